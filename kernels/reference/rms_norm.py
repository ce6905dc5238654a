"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, computed in float32.

Shapes: x [..., hidden], weight [hidden]. Moves x once in and once out. A weight kept in float32
for a narrower x is multiplied in float32 too, and the product rounded once.
"""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension; the result has x's dtype."""
    if weight.dtype is x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
    return wide.to(x.dtype)
