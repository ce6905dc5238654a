"""y = x W^T + b in e4m3 on GPUs: rows of x are scaled as they come, weights once at load.

    row scale[m] = max over k |x[m, k]| / 448            x8 = e4m3(x / scale)
    y            = `scaled_matmul` of x8 and w8, or `torch._scaled_mm`

Shapes: x [rows, in] in 16 or 32 bits, weight float8_e4m3fn [out, in] with scales float32 [out],
y [rows, out] in x's dtype. Quantising reads x twice, the second time from cache, and moves
(e + 1) rows in bytes at e bytes a number. The definition, and what becomes of zeros and of NaN,
is in `reference/fp8_linear.py`. Needs compute capability 8.9: older GPUs have no e4m3.

Which product is taken is a rule, not a trial: torch's own has no variant for few rows, ours
spreads few rows over the GPU; torch's needs capability 9.0, bfloat16 results and sizes that are
multiples of 16. Not yet measured on a GPU.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.e4m3 import round_to_e4m3
from kernels.scaled_matmul import HOPPER, ScaledMatrix, scaled_matmul
from kernels.scaled_rows import largest_size, scaled_rows

_MIN_TORCH_ROWS = 128


@triton.jit
def quantise_fp8_kernel(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, stride: int, width: int, block: tl.constexpr
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    own = x + row * stride
    lanes = tl.arange(0, block)
    top = largest_size(own, width, block)
    tl.store(scales + row, tl.div_rn(top, 448.0))
    is_sound = (top > 0) & (top < float("inf"))
    inverse = tl.where(is_sound, tl.div_rn(448.0, top), 0.0)
    for start in range(0, width, block):
        columns = start + lanes
        part = tl.load(own + columns, mask=columns < width, other=0.0)  # [block]
        scaled = tl.where(is_sound, part.to(tl.float32) * inverse, 0.0)
        rounded = round_to_e4m3(scaled)
        place = values + row * width + columns
        tl.store(place, rounded.to(tl.float8e4nv), mask=columns < width)


def quantise_fp8(x: Tensor) -> ScaledMatrix:
    """Scale the rows of x [rows, width], which may lie apart, to float8_e4m3fn."""
    return scaled_rows(quantise_fp8_kernel, x, torch.float8_e4m3fn)


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Project x [rows, in] by e4m3 weights [out, in] and their scales [out]."""
    assert weight.dtype is torch.float8_e4m3fn, weight.dtype
    x8, w8 = quantise_fp8(x), ScaledMatrix(weight, weight_scales)
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    if takes_torch(tuple(x.shape), len(weight), x.dtype, capability):
        return torch_scaled_matmul(x8, w8, bias, x.dtype)
    return scaled_matmul(x8, w8, bias, x.dtype)


def takes_torch(
    shape: tuple[int, ...], channels: int, dtype: torch.dtype, capability: tuple[int, int]
) -> bool:
    """Whether the product of x of this shape is better, and possible, by `torch._scaled_mm`."""
    rows, depth = shape
    is_possible = dtype is torch.bfloat16 and depth % 16 == 0 and channels % 16 == 0
    return is_possible and capability >= HOPPER and rows >= _MIN_TORCH_ROWS


def torch_scaled_matmul(
    x: ScaledMatrix, weight: ScaledMatrix, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What `scaled_matmul` does, by torch's own kernels."""
    out = torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=dtype,
    )
    return out if bias is None else out + bias
