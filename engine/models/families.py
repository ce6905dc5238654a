"""What a model_type implies that its config.json does not say.

A family is a row of data. Everything else a model is made of is read from its config, so a new
family of the same build is a new row here, and the decoder does not learn its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class Windows(Enum):
    """Which layers look at the last `sliding_window` positions only."""

    NEVER = "the family has no windows"
    ALL = "every layer, if sliding_window is set"
    FLAGGED = "with use_sliding_window: those in layer_types, or from max_window_layers on"
    FLAGGED_WITHOUT_ROPE = "with use_sliding_window: those in layer_types, or those without rope"
    MIXED = "those in layer_types, or all but every sliding_window_pattern-th"


class Bias(Enum):
    """Which attention projections have a bias."""

    NEVER = "none"
    QKV = "queries, keys and values"
    STATED = "all four, if attention_bias is set"


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one model_type, most of them defaults for what a config may leave out.

    `head_dim` and `query_scale_size` default to hidden_size / heads and to head_dim.
    `has_block_output_norms`: attention and MLP outputs are normalised before they are added.
    `has_norm_offset`: norms multiply by 1 + weight. `local_rope_theta`: layers with a window
    have a rope of their own.
    """

    windows: Windows = Windows.NEVER
    window: int | None = None
    window_pattern: int = 2
    bias: Bias = Bias.STATED
    can_have_mlp_bias: bool = False
    activation: str = "silu"
    head_dim: int | None = None
    query_scale_size: int | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    no_rope_interval: int | None = None
    has_qk_norm: bool = False
    has_tied_embeddings: bool = False
    has_scaled_embedding: bool = False
    has_block_output_norms: bool = False
    has_norm_offset: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    can_cap_attention: bool = False
    can_cap_logits: bool = False


_GEMMA_2 = Family(
    windows=Windows.MIXED,
    window=4096,
    activation="gelu_pytorch_tanh",
    head_dim=256,
    query_scale_size=256,
    has_tied_embeddings=True,
    has_scaled_embedding=True,
    has_block_output_norms=True,
    has_norm_offset=True,
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
    can_cap_attention=True,
    can_cap_logits=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(can_have_mlp_bias=True),
    "mistral": Family(windows=Windows.ALL, window=4096, bias=Bias.NEVER),
    "qwen2": Family(windows=Windows.FLAGGED, window=4096, bias=Bias.QKV),
    "qwen3": Family(windows=Windows.FLAGGED, window=4096, head_dim=128, has_qk_norm=True),
    "smollm3": Family(
        windows=Windows.FLAGGED_WITHOUT_ROPE,
        can_have_mlp_bias=True,
        rope_theta=2_000_000.0,
        no_rope_interval=4,
        has_tied_embeddings=True,
    ),
    "gemma2": _GEMMA_2,
    "gemma3_text": replace(
        _GEMMA_2,
        window_pattern=6,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        has_qk_norm=True,
        attention_soft_cap=None,
        logit_soft_cap=None,
        can_cap_attention=False,
    ),
}
