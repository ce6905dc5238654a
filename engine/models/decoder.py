"""A decoder-only transformer, driven by its description.

One pass takes the rows of one step, whatever sequences they belong to, and gives their last
hidden states. Attention metadata comes in as an argument; there is no state but the weights.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBatch
from engine.layers.linear import Linear
from engine.models.description import DecoderDescription
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import apply_rope
from kernels.reference.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one block. `qkv` and `gate_up` are fused: one product instead of several."""

    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The model: rope tables are [positions, 2, head_dim / 2] in the weights' dtype."""

    def __init__(
        self,
        description: DecoderDescription,
        embedding: Tensor,
        layers: list[DecoderLayer],
        head: tuple[Tensor, Linear],
        rope: tuple[Tensor, Tensor],
    ) -> None:
        self.description = description
        self.dtype = embedding.dtype
        self._embedding = embedding
        self._layers = layers
        self._final_norm, self._lm_head = head
        self._cos, self._sin = rope

    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, caches: Tensor
    ) -> Tensor:
        """Normalised states [rows, hidden] of the rows' tokens; KV goes into caches[layer]."""
        eps = self.description.rms_norm_eps
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = functional.embedding(token_ids, self._embedding)
        for layer, cache in zip(self._layers, caches, strict=True):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attention(layer, normed, (cos, sin), batch, cache)
            normed = rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + layer.down(silu_mul(layer.gate_up(normed)))
        return rms_norm(hidden, self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [rows, vocab] of the next token, for the rows that want one."""
        return self._lm_head(hidden)

    def _attention(
        self,
        layer: DecoderLayer,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        cache: Tensor,
    ) -> Tensor:
        shape = self.description
        qkv = layer.qkv(x).view(x.shape[0], -1, shape.head_dim)
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = apply_rope(qkv[:, :num_rotated], *rope)
        # Keys are rotated in place of the plain ones, so that keys and values stay neighbours.
        qkv[:, :num_rotated] = rotated
        out = batch.attend(
            qkv[:, : shape.num_heads],
            qkv[:, shape.num_heads :],
            cache,
            1 / math.sqrt(shape.head_dim),
        )
        return layer.attention_out(out.reshape(x.shape[0], -1))
