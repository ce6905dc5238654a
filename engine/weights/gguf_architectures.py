"""The architectures that are converted from GGUF: their settings, tensors and order of rows.

Each is a row of data. What a file says beyond these settings is refused, for `config.json`
could not say it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of general.architecture. `has_paired_rows`: see hf_rows."""

    hf_class: str
    has_paired_rows: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", has_paired_rows=True),
    "qwen2": Architecture("Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", has_qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and constants of one model. `is_tied`: the output uses the embedding's rows."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def architecture(self) -> Architecture:
        """What all models of this name share."""
        return ARCHITECTURES[self.name]

    def config(self, rope_scaling: Mapping[str, object] | None) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": [self.architecture.hf_class],
            "model_type": self.name,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            **self.generation_config(),
        }

    def generation_config(self) -> dict[str, object]:
        """generation_config.json."""
        eos = self.eos_token_ids
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
            "pad_token_id": self.pad_token_id,
        }


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """Where a GGUF tensor goes. `num_paired_heads` is set for rows that are stored in pairs."""

    name: str
    shape: tuple[int, ...]
    num_paired_heads: int | None = None


def read_shape(metadata: GgufMetadata, has_output: bool) -> ModelShape:
    """The model's sizes. Raises GgufNotSupported for what `config.json` could not say."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufNotSupported(f"Architecture {name!r} is not converted; supported: {known}.")
    metadata.require("split.count", 1)
    for key in ("expert_count", "attention.sliding_window"):
        metadata.refuse(f"{name}.{key}")
    num_heads = metadata.integer(f"{name}.attention.head_count")
    hidden_size = metadata.integer(f"{name}.embedding_length")
    head_dim = metadata.optional_integer(f"{name}.attention.key_length")
    head_dim = hidden_size // num_heads if head_dim is None else head_dim
    for key in ("rope.dimension_count", "attention.value_length"):
        metadata.require(f"{name}.{key}", head_dim)
    kv_heads = metadata.optional_integer(f"{name}.attention.head_count_kv")
    token_id = metadata.optional_integer
    ends = (token_id("tokenizer.ggml.eos_token_id"), token_id("tokenizer.ggml.eot_token_id"))
    return ModelShape(
        name=name,
        vocab_size=len(metadata.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{name}.feed_forward_length"),
        num_layers=metadata.integer(f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        context_length=metadata.integer(f"{name}.context_length"),
        rms_norm_eps=_shortest(metadata.number(f"{name}.attention.layer_norm_rms_epsilon")),
        rope_theta=metadata.number(f"{name}.rope.freq_base", 10000.0),
        is_tied=not has_output,
        bos_token_id=token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=token_id("tokenizer.ggml.padding_token_id"),
    )


def tensor_names(shape: ModelShape) -> dict[str, TargetTensor]:
    """Every tensor of the model: GGUF name to Hugging Face name and shape."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    architecture = shape.architecture
    sizes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (shape.head_dim,),
        "attn_k_norm": (shape.head_dim,),
    }
    paired: dict[str, int] = {}
    if architecture.has_paired_rows:
        paired = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    table = (shape.vocab_size, hidden)
    names = {
        "token_embd.weight": TargetTensor("model.embed_tokens.weight", table),
        "output_norm.weight": TargetTensor("model.norm.weight", (hidden,)),
    }
    if not shape.is_tied:
        names["output.weight"] = TargetTensor("lm_head.weight", table)
    parts = {**_LAYER_PARTS, **(_QK_NORMS if architecture.has_qk_norm else {})}
    for layer in range(shape.num_layers):
        for part, name in parts.items():
            names[f"blk.{layer}.{part}.weight"] = TargetTensor(
                f"model.layers.{layer}.{name}.weight", sizes[part], paired.get(part)
            )
        for part in ("attn_q", "attn_k", "attn_v") if architecture.has_qkv_bias else ():
            names[f"blk.{layer}.{part}.bias"] = TargetTensor(
                f"model.layers.{layer}.{_LAYER_PARTS[part]}.bias", sizes[part][:1]
            )
    return names


def hf_rows(rows: npt.NDArray[np.float32], target: TargetTensor) -> npt.NDArray[np.float32]:
    """The tensor with its rows in Hugging Face's order.

    Rotary position turns pairs of rows of each query and key head. Llama's GGUF stores a pair
    side by side, (0, 1), (2, 3), ...; Hugging Face stores first halves, then second halves.
    """
    if target.num_paired_heads is None:
        return rows
    pairs = rows.reshape(target.num_paired_heads, -1, 2, rows.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The short decimal that a float32 was written from: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))
