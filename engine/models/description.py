"""What a decoder is made of, read from its config.json: data, not code.

Only what is fully supported is accepted. Anything else is refused by name, because a model
that loads and speaks nonsense is worse than one that does not load.
"""

import json
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_MODEL_TYPES = ("llama",)


class UnsupportedModel(ValueError):
    """The folder holds something that this engine cannot run faithfully; the text says what."""


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A Llama-like decoder: pre-norm blocks of grouped-query attention and a SwiGLU MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    has_attention_bias: bool
    has_mlp_bias: bool
    has_tied_embeddings: bool
    eos_token_ids: frozenset[int]


def read_description(folder: Path) -> DecoderDescription:
    """Read config.json (and generation_config.json for the end tokens) or refuse by name."""
    path = folder / "config.json"
    config = _Config(path, _read_object(path))
    _refuse_unsupported(config)
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{path}: {heads} query heads over {kv_heads} KV heads of {head_dim}; the first "
            "must be a multiple of the second and the head size even."
        )
    return DecoderDescription(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        has_attention_bias=config.flag("attention_bias"),
        has_mlp_bias=config.flag("mlp_bias"),
        has_tied_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(folder, config),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """A JSON object whose fields are checked as they are read."""

    path: Path
    values: dict[str, object]

    def get(self, name: str) -> object:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not a positive integer.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not a positive number.")
        return float(value)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def object(self, name: str) -> "_Config":
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not an object.")
        return _Config(self.path, value)


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise UnsupportedModel(f"{path} is missing: a model folder needs it.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object.")
    return value


def _refuse_unsupported(config: _Config) -> None:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(
            f"{config.path}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    activation = config.get("hidden_act")
    if activation not in (None, "silu"):
        raise UnsupportedModel(
            f"{config.path}: hidden_act {activation!r} is not supported; supported: silu."
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{config.path}: quantization_config is not supported; supported: plain weights "
            "in bfloat16, float16 or float32."
        )


def _rope_theta(config: _Config) -> float:
    """Newer checkpoints keep theta inside rope_parameters, older ones beside rope_scaling."""
    rope = config.object("rope_parameters")
    scaling = config.object("rope_scaling")
    for part in (rope, scaling):
        kind = part.get("rope_type") or part.get("type") or "default"
        if kind != "default":
            raise UnsupportedModel(
                f"{config.path}: rope scaling {kind!r} is not supported; supported: default "
                "(no scaling)."
            )
    return rope.number("rope_theta", scaling.number("rope_theta", _outer_theta(config)))


def _outer_theta(config: _Config) -> float:
    return config.number("rope_theta", 10000.0)


def _eos_token_ids(folder: Path, config: _Config) -> frozenset[int]:
    """generation_config.json knows better which tokens end a turn; config.json is the fallback."""
    generation = folder / "generation_config.json"
    value = None
    if generation.is_file():
        value = _read_object(generation).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise UnsupportedModel(f"{folder}: eos_token_id is {value!r}; integers are expected.")
    return frozenset(ids)
