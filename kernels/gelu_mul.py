"""GeGLU's middle on GPUs: gelu(gate) * up, where both come from one fused projection.

gelu is the approximation by tanh, and (1 + tanh(z)) / 2 = sigmoid(2 z):

    y = gate * sigmoid(sqrt(8 / pi) (gate + 0.044715 gate^3)) * up

Shapes and bytes moved: see `gated_mul.py`.
"""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_mul import gate_and_up, gated_mul


@triton.jit
def gelu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, stride: int, width: int, block: tl.constexpr
) -> None:
    """`block` columns of one row."""
    gate, up, place, is_inside = gate_and_up(gate_up, stride, width, block)
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + place, gate * tl.sigmoid(inner) * up, mask=is_inside)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Activate the first half of each row and multiply it with the second."""
    return gated_mul(gelu_mul_kernel, gate_up)
