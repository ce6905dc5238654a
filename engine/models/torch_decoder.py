"""A decoder out of torch's operators: on any device, and the definition of what is right.

The kernels for CPUs (`cpu_decoder.py`) do the same in one pass, several times faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBatch, CacheShape, attention_batch
from engine.layers.kv_caches import KVCaches
from engine.layers.linear import Linear
from engine.layers.shard import WHOLE, Shard
from engine.layers.step_layout import StepLayout
from engine.models.decoder import DecoderWeights, LayerWeights, LinearWeights, RopeTables
from engine.models.description import DecoderDescription, LayerDescription
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import apply_rope
from kernels.reference.silu_mul import silu_mul

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A block whose projections are laid out for this machine."""

    weights: LayerWeights
    qkv: Linear
    attention_out: Linear
    gate_up: Linear
    down: Linear


class TorchDecoder:
    """A Decoder. With `is_int8` its projections multiply in int8."""

    def __init__(
        self,
        description: DecoderDescription,
        weights: DecoderWeights,
        shard: Shard = WHOLE,
        *,
        is_int8: bool = False,
    ) -> None:
        self.description = description
        self._dtype = weights.embedding.dtype
        self._is_int8 = is_int8
        self._shard = shard
        self._embedding = weights.embedding
        self._layers = [self._laid_out(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._lm_head = None if weights.lm_head is None else self._linear(weights.lm_head)
        self._ropes = [(cos.to(self._dtype), sin.to(self._dtype)) for cos, sin in weights.ropes]
        self._activation = _ACTIVATIONS[description.activation]
        # Rounded as the model's own code rounds it, to the dtype of what it multiplies.
        self._scale = torch.tensor(description.embedding_scale, dtype=self._dtype).item()

    def new_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """See Decoder."""
        sizes = self.description.kv_sizes(num_blocks * block_size)
        tensor = torch.zeros(sizes, dtype=self._dtype)
        return KVCaches(tensor, block_size)

    def hidden_states(
        self, token_ids: NDArray[np.int64], layout: StepLayout, caches: KVCaches
    ) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        shape = self.description
        eps = shape.rms_norm_eps
        cache_shape = CacheShape(
            shape.num_kv_heads, caches.num_blocks, caches.block_size, shape.head_dim
        )
        batch = attention_batch(layout, cache_shape, self._dtype, shape.windows)
        positions = torch.from_numpy(layout.positions)
        ropes = [(cos[positions], sin[positions]) for cos, sin in self._ropes]
        hidden = functional.embedding(torch.from_numpy(token_ids), self._embedding)
        if self._scale != 1:
            hidden = hidden * self._scale
        for kind, layer, cache in zip(shape.layers, self._layers, caches.tensor, strict=True):
            weights = layer.weights
            rope = None if kind.rope is None else ropes[kind.rope]
            qkv = layer.qkv(rms_norm(hidden, weights.input_norm, eps))
            out = layer.attention_out(self._attention((kind, weights), qkv, rope, batch, cache))
            hidden = hidden + self._normed(self._shard.sum(out), weights.attention_out_norm)
            out = layer.gate_up(rms_norm(hidden, weights.mlp_norm, eps))
            out = layer.down(self._activation(out))
            hidden = hidden + self._normed(self._shard.sum(out), weights.mlp_out_norm)
        hidden = rms_norm(hidden, self._final_norm, eps)
        return hidden, hidden.isfinite().all(dim=-1)

    def logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """See Decoder."""
        assert self._lm_head is not None, "only the first rank knows words"
        scores = self._lm_head(hidden[torch.from_numpy(rows)])
        cap = self.description.logit_soft_cap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def wipe(self, caches: KVCaches, slots: NDArray[np.int64]) -> None:
        """See Decoder."""
        caches.tensor[:, :, torch.from_numpy(slots)] = 0

    def _laid_out(self, weights: LayerWeights) -> _Layer:
        return _Layer(
            weights,
            self._linear(weights.qkv),
            self._linear(weights.attention_out),
            self._linear(weights.gate_up),
            self._linear(weights.down),
        )

    def _linear(self, weights: LinearWeights) -> Linear:
        return Linear(weights.weight, weights.bias, is_int8=self._is_int8)

    def _attention(
        self,
        block: tuple[LayerDescription, LayerWeights],
        qkv: Tensor,
        rope: RopeTables | None,
        batch: AttentionBatch,
        cache: Tensor,
    ) -> Tensor:
        (kind, weights), shape = block, self.description
        rows, num_heads, num_turned = (
            len(qkv),
            shape.num_heads,
            shape.num_heads + shape.num_kv_heads,
        )
        qkv = qkv.view(rows, -1, shape.head_dim)
        # Heads are changed in place of the plain ones, so that keys and values stay neighbours.
        if weights.query_norm is not None:
            qkv[:, :num_heads] = self._normed(qkv[:, :num_heads], weights.query_norm)
            qkv[:, num_heads:num_turned] = self._normed(
                qkv[:, num_heads:num_turned], weights.key_norm
            )
        if rope is not None:
            qkv[:, :num_turned] = apply_rope(qkv[:, :num_turned], *rope)
        out = batch.attend(qkv[:, :num_heads], qkv[:, num_heads:], cache, kind.attention)
        return out.reshape(rows, -1)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.description.rms_norm_eps)
