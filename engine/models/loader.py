"""Loads a model folder: config.json and safetensors, nothing that could run code.

Every tensor of the checkpoint is accounted for: a missing, unknown or misshapen one is an
error with its name, because guessing would give a model that speaks nonsense.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.layers.linear import Linear
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.description import DecoderDescription, UnsupportedModel, read_description
from kernels.reference.rope import rope_tables

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(folder: Path, dtype: str) -> Decoder:
    """Load the model in the given dtype ("float32" or "bfloat16").

    Raises UnsupportedModel, naming what is wrong and what is supported.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    _refuse_pickles(folder)
    description = read_description(folder)
    weights = _Weights(_read_tensors(folder), DTYPES[dtype])
    decoder = _assemble(description, weights)
    weights.refuse_leftovers()
    return decoder


class _Weights:
    """The checkpoint's tensors by name; each is taken once, with the shape it must have."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self.dtype = dtype

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise UnsupportedModel(f"The checkpoint has no tensor {name}.")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"Tensor {name} is {list(tensor.shape)}; config.json says {list(shape)}."
            )
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"Tensor {name} is {tensor.dtype}; only floats are supported.")
        return tensor.to(self.dtype)

    def linear(self, parts: dict[str, int], in_features: int, has_bias: bool) -> Linear:
        """One projection out of several that read the same input, one below the other."""
        weights = [self.take(f"{name}.weight", out, in_features) for name, out in parts.items()]
        biases = [self.take(f"{name}.bias", out) for name, out in parts.items() if has_bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def discard(self, name: str) -> None:
        self._tensors.pop(name, None)

    def refuse_leftovers(self) -> None:
        # Old checkpoints store this table; it follows from theta.
        unknown = [name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise UnsupportedModel(
                f"The checkpoint holds {len(unknown)} tensors that config.json does not account "
                f"for, such as {min(unknown)}."
            )


def _refuse_pickles(folder: Path) -> None:
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder} is not a folder.")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModel(
            f"{folder} holds {pickles[0]}: loading such a file can run code. Only safetensors "
            "are accepted; remove it or convert it."
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder} holds no model*.safetensors.")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                repeated = tensors.keys() & set(names)
                if repeated:
                    raise UnsupportedModel(f"{path} repeats tensor {min(repeated)}.")
                tensors |= {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(
                f"{path} is not a readable safetensors file: {error}."
            ) from error
    return tensors


def _assemble(shape: DecoderDescription, weights: _Weights) -> Decoder:
    embedding = weights.take("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
    layers = [_layer(shape, weights, f"model.layers.{i}") for i in range(shape.num_layers)]
    final_norm = weights.take("model.norm.weight", shape.hidden_size)
    if shape.has_tied_embeddings:
        weights.discard("lm_head.weight")
        lm_head = Linear(embedding)
    else:
        lm_head = weights.linear({"lm_head": shape.vocab_size}, shape.hidden_size, has_bias=False)
    cos, sin = rope_tables(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
    rope = cos.to(weights.dtype), sin.to(weights.dtype)
    return Decoder(shape, embedding, layers, (final_norm, lm_head), rope)


def _layer(shape: DecoderDescription, weights: _Weights, prefix: str) -> DecoderLayer:
    query_size = shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return DecoderLayer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", shape.hidden_size),
        qkv=weights.linear(
            {
                f"{attention}.q_proj": query_size,
                f"{attention}.k_proj": kv_size,
                f"{attention}.v_proj": kv_size,
            },
            shape.hidden_size,
            shape.has_attention_bias,
        ),
        attention_out=weights.linear(
            {f"{attention}.o_proj": shape.hidden_size}, query_size, shape.has_attention_bias
        ),
        mlp_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", shape.hidden_size),
        gate_up=weights.linear(
            {
                f"{mlp}.gate_proj": shape.intermediate_size,
                f"{mlp}.up_proj": shape.intermediate_size,
            },
            shape.hidden_size,
            shape.has_mlp_bias,
        ),
        down=weights.linear(
            {f"{mlp}.down_proj": shape.hidden_size}, shape.intermediate_size, shape.has_mlp_bias
        ),
    )
