"""y = x W^T + b in eight-bit floats (e4m3): weights scaled by output channel, x by row.

    weight scale[n] = max over k |W[n, k]| / 448     w8 = e4m3(W * (448 / max))     at load
    row scale[m]    = max over k |x[m, k]| / 448     x8 = e4m3(x * (448 / max))     at each call
    y[m, n]         = (sum over k of x8 w8) * row scale[m] * weight scale[n] + b[n]

e4m3 has three bits after the point and reaches 448; rounding is to the nearest, halves to even.
A row or a channel of zeros has scale 0 and gives zeros. A row with NaN or infinity gives
nothing finite, and other rows as they were.

Shapes: x [rows, in], W and w8 [out, in], weight scale and b [out] in float32 and in x's dtype;
y [rows, out] in x's dtype. Sums and scaling are in float32, rounded once.
"""

import torch
from torch import Tensor

LARGEST = 448.0


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of x [rows, width]: float8_e4m3fn of its shape, and float32 [rows]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # Whatever stands in a row that is not finite, its scale lets nothing finite come out.
    is_sound = (largest > 0) & largest.isfinite()
    # A number divided by a tensor is rounded twice; two tensors are divided as floats are.
    inverse = torch.full_like(largest, LARGEST) / largest
    values = torch.where(is_sound, wide * inverse, 0.0).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn), largest[:, 0] / LARGEST


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Project x by e4m3 weights [out, in] and their scales, as `quantise_fp8` gives them."""
    values, row_scales = quantise_fp8(x)
    out = values.float() @ weight.float().T * row_scales[:, None] * weight_scales
    return (out if bias is None else out + bias).to(x.dtype)
