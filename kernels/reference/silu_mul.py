"""SwiGLU's middle: silu(gate) * up, where both come from one fused projection.

Shapes: gate_up [tokens, 2 x width], gate first; result [tokens, width].
"""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """Activate the first half and multiply it with the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
