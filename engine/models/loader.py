"""Loads a model folder: config.json and safetensors, nothing that could run code.

Every tensor of the checkpoint is accounted for: a missing, unknown or misshapen one is an
error with its name, because guessing would give a model that speaks nonsense.

A rank of several reads only its share (`engine/layers/shard.py`). The embedding is on all of
them, for looking up a token costs nothing; the output weights are on the first alone, which
chooses words without asking the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.layers.shard import WHOLE, Shard
from engine.models.config_file import UnsupportedModel
from engine.models.cpu_decoder import CpuDecoder
from engine.models.decoder import (
    Decoder,
    DecoderWeights,
    LayerWeights,
    LinearWeights,
    RopeTables,
)
from engine.models.description import DecoderDescription, read_description
from engine.models.rope_description import RopeDescription
from engine.models.rope_frequencies import amplitude, frequencies
from engine.models.torch_decoder import TorchDecoder
from engine.weights.safetensors_folder import SafetensorsFolder, WeightsNotUsable
from kernels.cpu.extension import extension
from kernels.reference.rope import rope_tables

# What all but the projections computes in.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


def load_decoder(
    folder: Path, dtype: str, shard: Shard = WHOLE, *, has_kernels: bool = True
) -> Decoder:
    """Load the model, or a share of it, to compute in "float32", "bfloat16" or "int8".

    In int8, projections multiply whole numbers, rounded at load and at each step, and everything
    else is bfloat16. `has_kernels` False computes with torch's operators alone. Raises
    UnsupportedModel, naming what is wrong and what is supported.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    description = read_description(folder)
    refuse_too_many_ranks(description, shard.size)
    try:
        tensors = SafetensorsFolder(folder)
        assembly = _Assembly(description, tensors, DTYPES[dtype], shard)
        share, weights = assembly.share(), assembly.weights()
        native = extension() if has_kernels else None
        decoder: Decoder
        if native is None:
            decoder = TorchDecoder(share, weights, shard, is_int8=dtype == "int8")
        else:
            decoder = CpuDecoder(native, share, weights, shard, is_int8=dtype == "int8")
        tensors.refuse_leftovers()
    except WeightsNotUsable as error:
        raise UnsupportedModel(str(error)) from error
    return decoder


def refuse_too_many_ranks(description: DecoderDescription, num_ranks: int) -> None:
    """Raise UnsupportedModel if some rank would have nothing to keep."""
    most = min(description.num_kv_heads, description.intermediate_size)
    if num_ranks > most:
        raise UnsupportedModel(
            f"The model cannot be split over {num_ranks} ranks: it has {description.num_kv_heads} "
            f"KV heads, and each rank keeps at least one. Use at most {most} ranks."
        )


@dataclass(frozen=True, slots=True)
class _Side:
    """The inputs or outputs of a projection: how many there are, and which are kept here."""

    size: int
    kept: slice


class _Assembly:
    """Puts the tensors where the description wants them, in the dtype to compute in."""

    def __init__(
        self,
        shape: DecoderDescription,
        tensors: SafetensorsFolder,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        self._shape = shape
        self._tensors = tensors
        self._dtype = dtype
        self._shard = shard
        self._hidden = _Side(shape.hidden_size, slice(shape.hidden_size))
        # Query heads follow the KV head that they share.
        group = shape.num_heads // shape.num_kv_heads
        self._keys = self._split(shape.num_kv_heads, shape.head_dim)
        self._queries = self._split(shape.num_kv_heads, shape.head_dim * group)
        self._inner = self._split(shape.intermediate_size)

    def weights(self) -> DecoderWeights:
        """The whole model, or what this rank keeps of it."""
        shape = self._shape
        embedding = self._tensor("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        return DecoderWeights(
            embedding=embedding,
            layers=self._layers(),
            final_norm=self._norm("model.norm", shape.hidden_size),
            lm_head=self._lm_head(embedding),
            ropes=[self._rope(rope) for rope in shape.ropes],
        )

    def share(self) -> DecoderDescription:
        """The model as this rank computes it."""
        shape = self._shape
        return replace(
            shape,
            num_heads=_length(self._queries.kept) // shape.head_dim,
            num_kv_heads=_length(self._keys.kept) // shape.head_dim,
            intermediate_size=_length(self._inner.kept),
        )

    def _layers(self) -> Iterator[LayerWeights]:
        for i in range(self._shape.num_layers):
            yield self._layer(f"model.layers.{i}")

    def _lm_head(self, embedding: Tensor) -> LinearWeights | None:
        if self._shape.has_tied_embeddings or not self._shard.is_first:
            self._tensors.discard("lm_head.weight")
        if not self._shard.is_first:
            return None
        if self._shape.has_tied_embeddings:
            return LinearWeights(embedding)
        words = _Side(self._shape.vocab_size, slice(self._shape.vocab_size))
        return self._linear({"lm_head": words}, self._hidden, has_bias=False)

    def _layer(self, prefix: str) -> LayerWeights:
        shape = self._shape
        hidden = shape.hidden_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {
            f"{attention}.{part}_proj": self._queries if part == "q" else self._keys
            for part in "qkv"
        }
        gate_up = {f"{mlp}.{part}_proj": self._inner for part in ("gate", "up")}
        # This name is the norm before the MLP, or where outputs are normalised, after attention.
        after = f"{prefix}.post_attention_layernorm"
        has_out_norms, has_qk_norm = shape.has_block_output_norms, shape.has_qk_norm
        before_mlp = f"{prefix}.pre_feedforward_layernorm" if has_out_norms else after
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(qkv, self._hidden, shape.has_qkv_bias),
            query_norm=self._norm_if(has_qk_norm, f"{attention}.q_norm", shape.head_dim),
            key_norm=self._norm_if(has_qk_norm, f"{attention}.k_norm", shape.head_dim),
            attention_out=self._linear(
                {f"{attention}.o_proj": self._hidden}, self._queries, shape.has_attention_out_bias
            ),
            attention_out_norm=self._norm_if(has_out_norms, after, hidden),
            mlp_norm=self._norm(before_mlp, hidden),
            gate_up=self._linear(gate_up, self._hidden, shape.has_mlp_bias),
            down=self._linear({f"{mlp}.down_proj": self._hidden}, self._inner, shape.has_mlp_bias),
            mlp_out_norm=self._norm_if(
                has_out_norms, f"{prefix}.post_feedforward_layernorm", hidden
            ),
        )

    def _split(self, count: int, unit: int = 1) -> _Side:
        return _Side(count * unit, self._shard.span(count, unit))

    def _tensor(self, name: str, *shape: int, part: tuple[slice, ...] = ()) -> Tensor:
        return self._tensors.take(name, *shape, part=part).to(self._dtype)

    def _norm(self, name: str, size: int) -> Tensor:
        if not self._shape.has_norm_offset:
            return self._tensor(f"{name}.weight", size)
        # 1 + weight has more digits than the weight's own dtype could keep.
        return 1.0 + self._tensors.take(f"{name}.weight", size).float()

    def _norm_if(self, has_norm: bool, name: str, size: int) -> Tensor | None:
        return self._norm(name, size) if has_norm else None

    def _linear(self, parts: dict[str, _Side], inputs: _Side, has_bias: bool) -> LinearWeights:
        """One projection out of several that read the same input, one below the other."""
        weights = [
            self._tensor(
                f"{name}.weight", outputs.size, inputs.size, part=(outputs.kept, inputs.kept)
            )
            for name, outputs in parts.items()
        ]
        biases = [
            self._tensor(f"{name}.bias", outputs.size, part=(outputs.kept,))
            for name, outputs in parts.items()
            if has_bias
        ]
        # What gives parts of a sum adds its bias once.
        is_part = _length(inputs.kept) < inputs.size
        keeps_bias = bool(biases) and (self._shard.is_first or not is_part)
        return LinearWeights(torch.cat(weights), torch.cat(biases) if keeps_bias else None)

    def _rope(self, rope: RopeDescription) -> RopeTables:
        shape = self._shape
        return rope_tables(
            frequencies(rope, shape.head_dim), shape.max_position_embeddings, amplitude(rope)
        )


def _length(kept: slice) -> int:
    return int(kept.stop) - int(kept.start or 0)
