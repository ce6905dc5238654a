"""Loads a model folder: config.json and safetensors, nothing that could run code.

Every tensor of the checkpoint is accounted for: a missing, unknown or misshapen one is an
error with its name, because guessing would give a model that speaks nonsense.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.models.config_file import UnsupportedModel
from engine.models.decoder import Decoder, DecoderLayer, RopeTables
from engine.models.description import DecoderDescription, read_description
from engine.models.rope_description import RopeDescription
from engine.models.rope_frequencies import amplitude, frequencies
from engine.weights.safetensors_folder import SafetensorsFolder, WeightsNotUsable
from kernels.reference.rope import rope_tables

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(folder: Path, dtype: str) -> Decoder:
    """Load the model to compute in the given dtype ("float32" or "bfloat16").

    Raises UnsupportedModel, naming what is wrong and what is supported.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    description = read_description(folder)
    try:
        tensors = SafetensorsFolder(folder)
        decoder = _Assembly(description, tensors, DTYPES[dtype]).decoder()
        tensors.refuse_leftovers()
    except WeightsNotUsable as error:
        raise UnsupportedModel(str(error)) from error
    return decoder


class _Assembly:
    """Puts the tensors where the description wants them, in the dtype to compute in."""

    def __init__(
        self, shape: DecoderDescription, tensors: SafetensorsFolder, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._tensors = tensors
        self._dtype = dtype

    def decoder(self) -> Decoder:
        """The whole model."""
        shape = self._shape
        embedding = self._tensor("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        layers = [self._layer(f"model.layers.{i}") for i in range(shape.num_layers)]
        final_norm = self._norm("model.norm", shape.hidden_size)
        if shape.has_tied_embeddings:
            self._tensors.discard("lm_head.weight")
            lm_head = Linear(embedding)
        else:
            lm_head = self._linear({"lm_head": shape.vocab_size}, shape.hidden_size, has_bias=False)
        ropes = [self._rope(rope) for rope in shape.ropes]
        return Decoder(shape, embedding, layers, (final_norm, lm_head), ropes)

    def _layer(self, prefix: str) -> DecoderLayer:
        shape = self._shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.{part}_proj": queries if part == "q" else keys for part in "qkv"}
        gate_up = {f"{mlp}.{part}_proj": inner for part in ("gate", "up")}
        # This name is the norm before the MLP, or where outputs are normalised, after attention.
        after = f"{prefix}.post_attention_layernorm"
        has_out_norms, has_qk_norm = shape.has_block_output_norms, shape.has_qk_norm
        before_mlp = f"{prefix}.pre_feedforward_layernorm" if has_out_norms else after
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(qkv, hidden, shape.has_qkv_bias),
            query_norm=self._norm_if(has_qk_norm, f"{attention}.q_norm", shape.head_dim),
            key_norm=self._norm_if(has_qk_norm, f"{attention}.k_norm", shape.head_dim),
            attention_out=self._linear(
                {f"{attention}.o_proj": hidden}, queries, shape.has_attention_out_bias
            ),
            attention_out_norm=self._norm_if(has_out_norms, after, hidden),
            mlp_norm=self._norm(before_mlp, hidden),
            gate_up=self._linear(gate_up, hidden, shape.has_mlp_bias),
            down=self._linear({f"{mlp}.down_proj": hidden}, inner, shape.has_mlp_bias),
            mlp_out_norm=self._norm_if(
                has_out_norms, f"{prefix}.post_feedforward_layernorm", hidden
            ),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._tensors.take(name, *shape).to(self._dtype)

    def _norm(self, name: str, size: int) -> Tensor:
        if not self._shape.has_norm_offset:
            return self._tensor(f"{name}.weight", size)
        # 1 + weight has more digits than the weight's own dtype could keep.
        return 1.0 + self._tensors.take(f"{name}.weight", size).float()

    def _norm_if(self, has_norm: bool, name: str, size: int) -> Tensor | None:
        return self._norm(name, size) if has_norm else None

    def _linear(self, parts: dict[str, int], in_features: int, has_bias: bool) -> Linear:
        """One projection out of several that read the same input, one below the other."""
        weights = [self._tensor(f"{name}.weight", out, in_features) for name, out in parts.items()]
        biases = [self._tensor(f"{name}.bias", out) for name, out in parts.items() if has_bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _rope(self, rope: RopeDescription) -> RopeTables:
        shape = self._shape
        cos, sin = rope_tables(
            frequencies(rope, shape.head_dim), shape.max_position_embeddings, amplitude(rope)
        )
        return cos.to(self._dtype), sin.to(self._dtype)
