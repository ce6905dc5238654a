"""The llama architecture in GGUF: its settings, its tensors, and its order of rows."""

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


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes and constants of one model. `is_tied`: the output uses the embedding's rows."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
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
            "rope_scaling": None,
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
    """Where a GGUF tensor goes. `num_rotary_heads` is set for the rows that are rotated."""

    name: str
    shape: tuple[int, ...]
    num_rotary_heads: int | None = None


def read_shape(metadata: GgufMetadata, has_output: bool) -> LlamaShape:
    """The model's sizes. Raises GgufNotSupported for what `config.json` could not say."""
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise GgufNotSupported(f"Architecture {architecture!r} is not converted; llama is.")
    for key in (
        "expert_count",
        "rope.scaling.type",
        "rope.scale_linear",
        "attention.sliding_window",
    ):
        metadata.refuse(f"llama.{key}")
    num_heads = metadata.integer("llama.attention.head_count")
    hidden_size = metadata.integer("llama.embedding_length")
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        metadata.require(f"llama.{key}", hidden_size // num_heads)
    token_id = metadata.optional_integer
    ends = (token_id("tokenizer.ggml.eos_token_id"), token_id("tokenizer.ggml.eot_token_id"))
    return LlamaShape(
        vocab_size=len(metadata.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("llama.feed_forward_length"),
        num_layers=metadata.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("llama.attention.head_count_kv"),
        context_length=metadata.integer("llama.context_length"),
        rms_norm_eps=_shortest(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=metadata.number("llama.rope.freq_base"),
        is_tied=not has_output,
        bos_token_id=token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=token_id("tokenizer.ggml.padding_token_id"),
    )


def tensor_names(shape: LlamaShape) -> dict[str, TargetTensor]:
    """Every tensor of the model: GGUF name to Hugging Face name and shape."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
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
    }
    rotary = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    table = (shape.vocab_size, hidden)
    names = {
        "token_embd.weight": TargetTensor("model.embed_tokens.weight", table),
        "output_norm.weight": TargetTensor("model.norm.weight", (hidden,)),
    }
    if not shape.is_tied:
        names["output.weight"] = TargetTensor("lm_head.weight", table)
    for layer in range(shape.num_layers):
        for part, name in _LAYER_PARTS.items():
            names[f"blk.{layer}.{part}.weight"] = TargetTensor(
                f"model.layers.{layer}.{name}.weight", sizes[part], rotary.get(part)
            )
    return names


def hf_rows(rows: npt.NDArray[np.float32], target: TargetTensor) -> npt.NDArray[np.float32]:
    """The tensor with its rows in Hugging Face's order.

    Rotary position turns pairs of rows of each query and key head. GGUF stores a pair side by
    side, (0, 1), (2, 3), ...; Hugging Face stores first halves, then second halves.
    """
    if target.num_rotary_heads is None:
        return rows
    pairs = rows.reshape(target.num_rotary_heads, -1, 2, rows.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The short decimal that a float32 was written from: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))
