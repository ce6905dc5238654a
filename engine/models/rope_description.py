"""How a model turns queries and keys by their position, read from its config.json.

Every kind is a fixed table of frequencies: the turn of a token depends on its own position and
on nothing else, so KV computed in any chunk, in any company, on any replica is the same.

"dynamic" deserves a word. Its frequencies are the plain ones up to max_position_embeddings and
change beyond it with the longest sequence of the batch, so that the same token at the same
place would have different keys in different company. This engine serves no position beyond
max_position_embeddings; there, plain frequencies are exactly what "dynamic" means.
"""

import math
from dataclasses import dataclass

from engine.models.config_file import ConfigObject, UnsupportedModel

SUPPORTED_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class PlainRope:
    """Pair i of a head turns by position x theta^(-2i / head_dim)."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions are divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Slow pairs are slowed by `factor`, fast ones are not, those between are blended.

    A pair is slow if its wave is longer than original_positions / low_freq_factor, and fast if
    shorter than original_positions / high_freq_factor.
    """

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """As Llama3Rope, blended by pair number between the pairs that turn beta times in all.

    `amplitude` multiplies queries and keys alike. `is_truncated` rounds the pair numbers outward.
    """

    theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int
    amplitude: float
    is_truncated: bool


RopeDescription = PlainRope | LinearRope | Llama3Rope | YarnRope


def read_rope(config: ConfigObject, default_theta: float) -> RopeDescription:
    """Newer checkpoints keep everything inside rope_parameters, older ones use rope_scaling."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return read_rope_object(config, config.object(name), config.number("rope_theta", default_theta))


def read_rope_object(
    config: ConfigObject, rope: ConfigObject, outer_theta: float
) -> RopeDescription:
    """One kind of rope, whose theta may lie beside it."""
    nested = sorted(key for key, value in rope.values.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedModel(
            f"{config.path}: rope parameters for {nested[0]!r} layers are not supported for "
            f"model_type {config.get('model_type')!r}; one kind for all layers is."
        )
    for part in (config, rope):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(
                f"{config.path}: partial_rotary_factor is not supported; whole heads turn."
            )
    theta = rope.number("rope_theta", outer_theta)
    match rope.text("rope_type", rope.text("type", "default")):
        case "default" | "dynamic":
            return PlainRope(theta)
        case "linear":
            return LinearRope(theta, rope.number("factor"))
        case "llama3":
            return _llama3(config, rope, theta)
        case "yarn":
            return _yarn(config, rope, theta)
        case kind:
            raise UnsupportedModel(
                f"{config.path}: rope scaling {kind!r} is not supported; supported: "
                f"{', '.join(SUPPORTED_ROPE_TYPES)}."
            )


def _llama3(config: ConfigObject, rope: ConfigObject, theta: float) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise UnsupportedModel(
            f"{config.path}: low_freq_factor {low} is not below high_freq_factor {high}."
        )
    return Llama3Rope(theta, rope.number("factor"), low, high, _original_positions(config, rope))


def _yarn(config: ConfigObject, rope: ConfigObject, theta: float) -> YarnRope:
    original = _original_positions(config, rope)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    return YarnRope(
        theta=theta,
        factor=factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        original_positions=original,
        amplitude=rope.number("attention_factor", _yarn_amplitude(rope, factor)),
        is_truncated=rope.flag("truncate", True),
    )


def _yarn_amplitude(rope: ConfigObject, factor: float) -> float:
    """As YaRN's paper has it: 1 + 0.1 ln(factor), or the ratio of two such terms if given."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return of(rope.number("mscale")) / of(rope.number("mscale_all_dim"))
    return of(1.0)


def _original_positions(config: ConfigObject, rope: ConfigObject) -> int:
    inside = rope.integer("original_max_position_embeddings", _max_positions(config))
    return config.integer("original_max_position_embeddings", inside)


def _max_positions(config: ConfigObject) -> int:
    return config.integer("max_position_embeddings")
