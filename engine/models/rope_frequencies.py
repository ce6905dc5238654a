"""The frequencies that a rope description stands for, as arithmetic in float32.

Frequency i is the angle by which pair i of a head turns from one position to the next.
"""

import math

import torch
from torch import Tensor

from engine.models.rope_description import (
    LinearRope,
    Llama3Rope,
    PlainRope,
    RopeDescription,
    YarnRope,
)


def frequencies(rope: RopeDescription, head_dim: int) -> Tensor:
    """Frequencies [head_dim / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope:
        case PlainRope():
            return plain
        case LinearRope():
            return plain / rope.factor
        case Llama3Rope():
            return _llama3(rope, plain)
        case YarnRope():
            return _yarn(rope, plain)


def amplitude(rope: RopeDescription) -> float:
    """What turned queries and keys are multiplied by."""
    return rope.amplitude if isinstance(rope, YarnRope) else 1.0


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_positions * plain / (2 * math.pi)
    fastness = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - fastness) * plain / rope.factor + fastness * plain


def _yarn(rope: YarnRope, plain: Tensor) -> Tensor:
    head_dim = 2 * len(plain)
    first, last = (
        _pair_that_turns(beta, rope, head_dim) for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # Two bounds in one place would divide by zero; a thousandth of a pair makes it a step.
    width = (last - first) or 0.001
    slowness = ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / rope.factor * slowness + plain * (1 - slowness)


def _pair_that_turns(times: float, rope: YarnRope, head_dim: int) -> float:
    """The (fractional) pair that turns this many times in the original context."""
    waves = rope.original_positions / (times * 2 * math.pi)
    return head_dim * math.log(waves) / (2 * math.log(rope.theta))
