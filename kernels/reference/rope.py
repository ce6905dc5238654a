"""Rotary position embedding over two halves (the layout of Hugging Face checkpoints).

With x = [a, b] the halves of one head and angle = position * frequency of the pair:

    [a, b]  ->  [a cos - b sin,  b cos + a sin] * amplitude

which is x * [cos, cos] + [b, a] * [-sin, sin]: one flip, one product, one fused product.
"""

import torch
from torch import Tensor


def rope_tables(
    frequencies: Tensor, max_positions: int, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ([cos, cos], [-sin, sin]), each [max_positions, 2, head_dim / 2] in float32.

    `frequencies` [head_dim / 2] are angles per position.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.stack((cos, cos), dim=1), torch.stack((-sin, sin), dim=1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by its rows of the tables [tokens, 2, head_dim / 2]."""
    tokens, heads, head_dim = x.shape
    halves = x.view(tokens, heads, 2, head_dim // 2)
    rotated = halves * cos.unsqueeze(1)
    rotated.addcmul_(halves.flip(2), sin.unsqueeze(1))
    return rotated.view(tokens, heads, head_dim)
