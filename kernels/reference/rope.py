"""Rotary position embedding over two halves (the layout of Hugging Face checkpoints).

With x = [a, b] the halves of one head and angle = position * theta^(-2i / head_dim):

    [a, b]  ->  [a cos - b sin,  b cos + a sin]

which is x * [cos, cos] + [b, a] * [-sin, sin]: one flip, one product, one fused product.
"""

import torch
from torch import Tensor


def rope_tables(max_positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return ([cos, cos], [-sin, sin]), each [max_positions, 2, head_dim / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, cos), dim=1), torch.stack((-sin, sin), dim=1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by its rows of the tables [tokens, 2, head_dim / 2]."""
    tokens, heads, head_dim = x.shape
    halves = x.view(tokens, heads, 2, head_dim // 2)
    rotated = halves * cos.unsqueeze(1)
    rotated.addcmul_(halves.flip(2), sin.unsqueeze(1))
    return rotated.view(tokens, heads, head_dim)
