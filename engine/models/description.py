"""What a decoder is made of, read from its config.json: data, not code.

Only what is fully supported is accepted. Anything else is refused by name, because a model
that loads and speaks nonsense is worse than one that does not load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.layers.attention import AttentionRules
from engine.models.config_file import ConfigObject, UnsupportedModel, read_config
from engine.models.families import FAMILIES, Bias, Family
from engine.models.layer_kinds import layers_have_rope, layers_have_window
from engine.models.rope_description import RopeDescription, read_rope, read_rope_object

SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Fields that change what a model computes, in ways that are not built here.
_FOREIGN_FIELDS = {
    "quantization_config": "plain weights in bfloat16, float16 or float32",
    "vision_config": "text models",
    "audio_config": "text models",
    "num_experts": "dense models",
    "num_local_experts": "dense models",
    "use_bidirectional_attention": "causal attention",
}


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """What may differ between layers. `rope` counts in the description's ropes; None: none."""

    attention: AttentionRules
    rope: int | None


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A decoder of grouped-query attention and gated MLPs, each behind an RMS norm.

    `has_qk_norm`: each query and key head is normalised before it turns.
    `has_block_output_norms`: attention and MLP outputs are normalised before they are added.
    `has_norm_offset`: norms multiply by 1 + weight. `embedding_scale` multiplies embeddings.
    `logit_soft_cap` squeezes scores into (-cap, cap). `max_position_embeddings` is the longest
    sequence that is served.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    activation: str
    has_qkv_bias: bool
    has_attention_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_block_output_norms: bool
    has_norm_offset: bool
    has_tied_embeddings: bool
    embedding_scale: float
    logit_soft_cap: float | None
    ropes: tuple[RopeDescription, ...]
    layers: tuple[LayerDescription, ...]
    eos_token_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        """Blocks of attention and MLP."""
        return len(self.layers)

    def kv_sizes(self, num_slots: int) -> tuple[int, int, int, int]:
        """The sizes of a KV cache with so many slots: [layers, 2 x kv_heads, slots, head_dim]."""
        return self.num_layers, 2 * self.num_kv_heads, num_slots, self.head_dim

    @property
    def windows(self) -> frozenset[int | None]:
        """The sliding windows that occur; None is a layer that sees everything before it."""
        return frozenset(layer.attention.window for layer in self.layers)


def read_description(folder: Path) -> DecoderDescription:
    """Read config.json (and generation_config.json for the end tokens) or refuse by name."""
    config = read_config(folder / "config.json")
    family = _family(config)
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", family.head_dim or hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{config.path}: {heads} query heads over {kv_heads} KV heads of {head_dim}; the first "
            "must be a multiple of the second and the head size even."
        )
    has_stated_bias = family.bias is Bias.STATED and config.flag("attention_bias")
    return DecoderDescription(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=config.integer("max_position_embeddings"),
        activation=_activation(config, family),
        has_qkv_bias=has_stated_bias or family.bias is Bias.QKV,
        has_attention_out_bias=has_stated_bias,
        has_mlp_bias=family.can_have_mlp_bias and config.flag("mlp_bias"),
        has_qk_norm=family.has_qk_norm,
        has_block_output_norms=family.has_block_output_norms,
        has_norm_offset=family.has_norm_offset,
        has_tied_embeddings=config.flag("tie_word_embeddings", family.has_tied_embeddings),
        embedding_scale=math.sqrt(hidden_size) if family.has_scaled_embedding else 1.0,
        logit_soft_cap=_logit_soft_cap(config, family),
        ropes=_ropes(config, family),
        layers=_layers(config, family, head_dim),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _family(config: ConfigObject) -> Family:
    for name, supported in _FOREIGN_FIELDS.items():
        if config.get(name):
            raise UnsupportedModel(
                f"{config.path}: {name} is not supported; supported: {supported}."
            )
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"{config.path}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(FAMILIES)}."
        )
    return family


def _activation(config: ConfigObject, family: Family) -> str:
    # Gemma's configs have both names; hidden_activation is the one that counts there.
    named = config.text("hidden_act", family.activation)
    if family.activation != "silu":
        named = config.text("hidden_activation", family.activation)
    if named not in SUPPORTED_ACTIVATIONS:
        raise UnsupportedModel(
            f"{config.path}: hidden_act {named!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ACTIVATIONS)}."
        )
    return named


def _logit_soft_cap(config: ConfigObject, family: Family) -> float | None:
    return _soft_cap(
        config, "final_logit_softcapping", family.logit_soft_cap, family.can_cap_logits
    )


def _attention_soft_cap(config: ConfigObject, family: Family) -> float | None:
    return _soft_cap(
        config, "attn_logit_softcapping", family.attention_soft_cap, family.can_cap_attention
    )


def _soft_cap(
    config: ConfigObject, name: str, default: float | None, is_supported: bool
) -> float | None:
    """The cap; null takes a family's own away."""
    if config.get(name) is None:
        return None if name in config.values else default
    if not is_supported:
        raise UnsupportedModel(
            f"{config.path}: {name} is not supported for model_type {config.get('model_type')!r}."
        )
    return config.number(name)


def _ropes(config: ConfigObject, family: Family) -> tuple[RopeDescription, ...]:
    """One, or where windows have their own: that of other layers, then that of windows."""
    if family.local_rope_theta is None:
        return (read_rope(config, family.rope_theta),)
    both = config.object("rope_parameters")
    whole, local = both.object("full_attention"), both.object("sliding_attention")
    if config.get("rope_scaling"):
        whole = config.object("rope_scaling")
    return (
        read_rope_object(config, whole, config.number("rope_theta", family.rope_theta)),
        read_rope_object(
            config, local, config.number("rope_local_base_freq", family.local_rope_theta)
        ),
    )


def _layers(config: ConfigObject, family: Family, head_dim: int) -> tuple[LayerDescription, ...]:
    scale_size = float(head_dim)
    if family.query_scale_size is not None:
        scale_size = config.number("query_pre_attn_scalar", family.query_scale_size)
    soft_cap = _attention_soft_cap(config, family)
    have_rope: Sequence[bool] = layers_have_rope(config, family)
    window = config.integer("sliding_window", family.window or 1)
    layers = []
    for has_rope, has_window in zip(
        have_rope, layers_have_window(config, family, have_rope), strict=True
    ):
        rules = AttentionRules(scale_size**-0.5, window if has_window else None, soft_cap)
        rope = 1 if has_window and family.local_rope_theta is not None else 0
        layers.append(LayerDescription(rules, rope if has_rope else None))
    return tuple(layers)


def _eos_token_ids(folder: Path, config: ConfigObject) -> frozenset[int]:
    """generation_config.json knows better which tokens end a turn; config.json is the fallback."""
    generation = folder / "generation_config.json"
    value = None
    if generation.is_file():
        value = read_config(generation).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise UnsupportedModel(f"{folder}: eos_token_id is {value!r}; integers are expected.")
    return frozenset(ids)
