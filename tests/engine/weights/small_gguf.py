"""Writes tiny models as llama.cpp's converter would, from Hugging Face weights."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from engine.text.token_bytes import byte_alphabet

Weights = Mapping[str, npt.NDArray[np.float32]]
Packed = Mapping[str, tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]]

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*CONTROL, "<tool>", *byte_alphabet(), "he", "ll", "hell")
MERGES = ("h e", "l l", "he ll")
TYPES = [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_weights(
    *, is_tied: bool, seed: int = 0, inner: int = INNER, vocab_size: int = len(TOKENS)
) -> dict[str, npt.NDArray[np.float32]]:
    """Hugging Face names and shapes; values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    keys = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not is_tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (inner, HIDDEN),
            "mlp.up_proj": (inner, HIDDEN),
            "mlp.down_proj": (HIDDEN, inner),
        }
        shapes.update((f"model.layers.{layer}.{p}.weight", s) for p, s in parts.items())
    return {
        name: (rng.integers(-127, 128, shape) / 64).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    weights: Weights,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, object] | None = None,
    packed: Packed | None = None,
) -> None:
    """`kind` is the type of the matrices; `extra` adds or replaces key-value pairs, or by None
    takes them away. A key of the architecture begins with its name. `packed` are tensors that
    are quantised already, by their GGUF names.
    """
    architecture = str((extra or {}).get("general.architecture", "llama"))
    common = {key.replace("llama.", f"{architecture}."): v for key, v in _METADATA.items()}
    values = {**common, **(extra or {})}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    paired = {}
    if architecture == "llama":
        paired = {"q_proj": values["llama.attention.head_count"]}
        paired["k_proj"] = values["llama.attention.head_count_kv"]
    for name, rows in weights.items():
        heads = paired.get(name.split(".")[-2])
        stored = _rotary_pairs(rows, heads) if isinstance(heads, int) else rows
        if rows.ndim == 1:
            writer.add_tensor(_gguf_name(name), stored)
        else:
            writer.add_tensor(_gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
    for gguf_name, (blocks, block_kind) in (packed or {}).items():
        writer.add_tensor(gguf_name, blocks, raw_dtype=block_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if not name.startswith("model.layers."):
        return top.get(name, name)
    _, _, layer, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _rotary_pairs(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row i of a head's first half, then row i of its second half: written out, not reshaped."""
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + part * half + place
        for head in range(heads)
        for place in range(half)
        for part in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])


_METADATA: dict[str, object] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": list(TOKENS),
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": list(MERGES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
