"""GeGLU's middle: gelu(gate) * up, where both come from one fused projection.

gelu is the approximation by tanh: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

Shapes: gate_up [tokens, 2 x width], gate first; result [tokens, width].
"""

from torch import Tensor
from torch.nn import functional


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Activate the first half and multiply it with the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
