"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, computed in float32.

Shapes: x [..., hidden], weight [hidden]. Moves x once in and once out.
"""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension; the result has x's dtype."""
    return functional.rms_norm(x, weight.shape, weight, eps)
