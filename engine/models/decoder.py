"""A decoder-only transformer, driven by its description.

One pass takes the rows of one step, whatever sequences they belong to, and gives their last
hidden states. Attention metadata comes in as an argument; there is no state but the weights.

The weights may be one rank's share: the description then counts the heads of that share, and
both halves of a layer end in a sum over ranks (`engine/layers/shard.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBatch
from engine.layers.linear import Linear
from engine.layers.shard import WHOLE, Shard
from engine.models.description import DecoderDescription, LayerDescription
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import apply_rope
from kernels.reference.silu_mul import silu_mul

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
}


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one block. `qkv` and `gate_up` are fused: one product instead of several.

    A norm that a model does not have is None.
    """

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: Linear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None


RopeTables = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that was learned, or one rank's share of it.

    Rope tables are [positions, 2, head_dim / 2] in the weights' dtype. Only the first rank has
    output weights, `lm_head`.
    """

    embedding: Tensor
    layers: Sequence[DecoderLayer]
    final_norm: Tensor
    lm_head: Linear | None
    ropes: Sequence[RopeTables]


class Decoder:
    """The model; `description` counts the heads that are computed here."""

    def __init__(
        self, description: DecoderDescription, weights: DecoderWeights, shard: Shard = WHOLE
    ) -> None:
        self.description = description
        self.dtype = weights.embedding.dtype
        self._shard = shard
        self._embedding = weights.embedding
        self._layers = weights.layers
        self._final_norm = weights.final_norm
        self._lm_head = weights.lm_head
        self._ropes = weights.ropes
        self._activation = _ACTIVATIONS[description.activation]
        # Rounded as the model's own code rounds it, to the dtype of what it multiplies.
        self._scale = torch.tensor(description.embedding_scale, dtype=self.dtype).item()

    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, caches: Tensor
    ) -> Tensor:
        """Normalised states [rows, hidden] of the rows' tokens; KV goes into caches[layer]."""
        eps = self.description.rms_norm_eps
        ropes = [(cos[positions], sin[positions]) for cos, sin in self._ropes]
        hidden = functional.embedding(token_ids, self._embedding)
        if self._scale != 1:
            hidden = hidden * self._scale
        for kind, layer, cache in zip(self.description.layers, self._layers, caches, strict=True):
            rope = None if kind.rope is None else ropes[kind.rope]
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            out = layer.attention_out(self._attention((kind, layer), qkv, rope, batch, cache))
            hidden = hidden + self._normed(self._shard.sum(out), layer.attention_out_norm)
            out = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))
            out = layer.down(self._activation(out))
            hidden = hidden + self._normed(self._shard.sum(out), layer.mlp_out_norm)
        return rms_norm(hidden, self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [rows, vocab] of the next token, for the rows that want one."""
        assert self._lm_head is not None, "only the first rank knows words"
        scores = self._lm_head(hidden)
        cap = self.description.logit_soft_cap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def _attention(
        self,
        block: tuple[LayerDescription, DecoderLayer],
        qkv: Tensor,
        rope: RopeTables | None,
        batch: AttentionBatch,
        cache: Tensor,
    ) -> Tensor:
        (kind, layer), shape = block, self.description
        rows, num_heads, num_turned = (
            len(qkv),
            shape.num_heads,
            shape.num_heads + shape.num_kv_heads,
        )
        qkv = qkv.view(rows, -1, shape.head_dim)
        # Heads are changed in place of the plain ones, so that keys and values stay neighbours.
        if layer.query_norm is not None:
            qkv[:, :num_heads] = self._normed(qkv[:, :num_heads], layer.query_norm)
            qkv[:, num_heads:num_turned] = self._normed(
                qkv[:, num_heads:num_turned], layer.key_norm
            )
        if rope is not None:
            qkv[:, :num_turned] = apply_rope(qkv[:, :num_turned], *rope)
        out = batch.attend(qkv[:, :num_heads], qkv[:, num_heads:], cache, kind.attention)
        return out.reshape(rows, -1)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.description.rms_norm_eps)
