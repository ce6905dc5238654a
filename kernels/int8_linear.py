"""y = x W^T + b in int8 on GPUs: rows of x are scaled as they come, weights once at load.

    row scale[m] = max over k |x[m, k]| / 127            x8 = round(x / scale)
    y            = `scaled_matmul` of x8 and w8

Shapes: x [rows, in] in 16 or 32 bits, weight int8 [out, in] with scales float32 [out], y
[rows, out] in x's dtype. Quantising reads x twice, the second time from cache, and moves
(e + 1) rows in bytes at e bytes a number. Rows are whole numbers of one program each. The
definition, and what becomes of zeros and of NaN, is in `reference/int8_linear.py`.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scaled_matmul import ScaledMatrix, scaled_matmul
from kernels.scaled_rows import largest_size, scaled_rows


@triton.jit
def quantise_int8_kernel(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, stride: int, width: int, block: tl.constexpr
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    own = x + row * stride
    lanes = tl.arange(0, block)
    top = largest_size(own, width, block)
    tl.store(scales + row, tl.div_rn(top, 127.0))
    is_sound = (top > 0) & (top < float("inf"))
    inverse = tl.where(is_sound, tl.div_rn(127.0, top), 0.0)
    for start in range(0, width, block):
        columns = start + lanes
        part = tl.load(own + columns, mask=columns < width, other=0.0)  # [block]
        scaled = tl.where(is_sound, part.to(tl.float32) * inverse, 0.0)
        # So large a number beside it leaves no room for fractions: halves go to even.
        rounded = (scaled + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        tl.store(values + row * width + columns, rounded.to(tl.int8), mask=columns < width)


def quantise_int8(x: Tensor) -> ScaledMatrix:
    """Scale the rows of x [rows, width], which may lie apart, to int8."""
    return scaled_rows(quantise_int8_kernel, x, torch.int8)


def int8_linear(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Project x [rows, in] by int8 weights [out, in] and their scales [out]."""
    assert weight.dtype is torch.int8, weight.dtype
    return scaled_matmul(quantise_int8(x), ScaledMatrix(weight, weight_scales), bias, x.dtype)
