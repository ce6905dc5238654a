"""y = x W^T + b in eight-bit whole numbers: weights scaled by output channel, x by row.

    weight scale[n] = max over k |W[n, k]| / 127     w8 = round(W * (127 / max))     at load
    row scale[m]    = max over k |x[m, k]| / 127     x8 = round(x * (127 / max))     at each call
    y[m, n]         = (sum over k of x8 w8) * row scale[m] * weight scale[n] + b[n]

Rounding is to the nearest, halves to even; numbers lie in -127 .. 127, and the sum is exact in
int32. A row or a channel of zeros has scale 0 and gives zeros. A row with NaN or infinity gives
nothing finite, and other rows as they were.

On CPUs (`kernels/cpu`) the inputs of a row have a scale for every 64 of them: an outlier then takes
digits from its neighbours only, and whole numbers become floats after every 64 products.

Shapes: x [rows, in], W and w8 [out, in], weight scale and b [out] in float32 and in x's dtype;
y [rows, out] in x's dtype. Scaling is in float32, rounded once.
"""

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = 127.0


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of x [rows, width]: int8 of its shape, and float32 [rows]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # Whatever stands in a row that is not finite, its scale lets nothing finite come out.
    is_sound = (largest > 0) & largest.isfinite()
    # A number divided by a tensor is rounded twice; two tensors are divided as floats are.
    inverse = torch.full_like(largest, LARGEST) / largest
    values = torch.where(is_sound, wide * inverse, 0.0).round().clamp(-LARGEST, LARGEST)
    return values.to(torch.int8), largest[:, 0] / LARGEST


def int8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    inputs_per_scale: int | None = None,
) -> Tensor:
    """Project x by int8 weights [out, in] and their scales, as `quantise_int8` gives them.

    `inputs_per_scale` None is one scale for a whole row.
    """
    rows, width = x.shape
    group = inputs_per_scale or width
    padding = -width % group
    groups = functional.pad(x, (0, padding)).reshape(-1, group)
    values, scales = quantise_int8(groups)
    # Sums of products of int8 are exact in float64, up to 2^38 of them.
    values = values.double().view(rows, -1, group)
    wide = functional.pad(weight.double(), (0, padding)).view(len(weight), -1, group)
    sums = torch.einsum("rgk,ogk->rgo", values, wide).float()
    out = (sums * scales.view(rows, -1, 1)).sum(dim=1) * weight_scales
    return (out if bias is None else out + bias).to(x.dtype)
