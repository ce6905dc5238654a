"""What quantising on GPUs shares: rows of numbers become eight bits and a scale each.

A row is one program, which reads it twice, the second time from cache.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scaled_matmul import ScaledMatrix

_BLOCK = 4096


@triton.jit
def largest_size(own: tl.tensor, width: int, block: tl.constexpr) -> tl.tensor:
    """The largest absolute value of the row at `own`; infinite if it has a NaN."""
    lanes = tl.arange(0, block)
    largest = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):
        columns = start + lanes
        part = tl.load(own + columns, mask=columns < width, other=0.0)  # [block]
        size = tl.abs(part.to(tl.float32))
        # Only NaN differs from itself, and no maximum could lose infinity.
        size = tl.where(size == size, size, float("inf"))  # noqa: PLR0124
        largest = tl.maximum(largest, size)
    return tl.max(largest, axis=0)


def scaled_rows(kernel: triton.JITFunction, x: Tensor, dtype: torch.dtype) -> ScaledMatrix:
    """Scale the rows of x [rows, width], which may lie apart, to this dtype by this kernel."""
    rows, width = x.shape
    assert x.stride(1) == 1, x.stride()
    values = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(width), _BLOCK)
        kernel[(rows,)](x, values, scales, x.stride(0), width, block=block, num_warps=8)
    return ScaledMatrix(values, scales)
