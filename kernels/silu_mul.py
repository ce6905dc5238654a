"""SwiGLU's middle on GPUs: silu(gate) * up, where both come from one fused projection.

    y = gate / (1 + exp(-gate)) * up

Shapes and bytes moved: see `gated_mul.py`.
"""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_mul import gate_and_up, gated_mul


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, stride: int, width: int, block: tl.constexpr
) -> None:
    """`block` columns of one row."""
    gate, up, place, is_inside = gate_and_up(gate_up, stride, width, block)
    tl.store(out + place, gate * tl.sigmoid(gate) * up, mask=is_inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Activate the first half of each row and multiply it with the second."""
    return gated_mul(silu_mul_kernel, gate_up)
