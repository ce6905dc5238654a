"""What the gated activations on GPUs share: activation(gate) * up of one fused projection.

Shapes: gate_up [rows, 2 x width], gate first; y [rows, width]. A program does a piece of a row.
Bytes moved, at e bytes an element: 3 e rows width. Computed in float32, rounded once.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def gate_and_up(
    gate_up: tl.tensor, stride: int, width: int, block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`block` columns of one row, [block] each: gate, up, places in y, and which there are."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    place = gate_up + row * stride + columns
    gate = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=is_inside, other=0.0).to(tl.float32)
    return gate, up, row * width + columns, is_inside


def gated_mul(kernel: triton.JITFunction, gate_up: Tensor) -> Tensor:
    """Activate the first half of each row and multiply it with the second, by this kernel."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape == (rows, 2 * width), gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        kernel[grid](gate_up, out, gate_up.stride(0), width, block=_BLOCK, num_warps=4)
    return out
