"""A decoder of the kernels for CPUs: a whole step in one call, without Python in between.

A row's numbers do not depend, to the last bit, on what is computed beside it or on how its
prompt was cut into chunks (`kernels/cpu/src`), in bfloat16 and int8 as in float32.
"""

from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.kv_caches import KVCaches
from engine.layers.shard import WHOLE, Shard
from engine.layers.step_layout import StepLayout
from engine.models.decoder import DecoderWeights, LayerWeights, LinearWeights, RopeTables
from engine.models.description import DecoderDescription, LayerDescription


class CpuDecoder:
    """A Decoder. `native` is the extension; with `is_int8`, projections multiply in int8."""

    def __init__(
        self,
        native: ModuleType,
        description: DecoderDescription,
        weights: DecoderWeights,
        shard: Shard = WHOLE,
        *,
        is_int8: bool = False,
    ) -> None:
        self.description = description
        self._native = native
        self._shard = shard
        self._dtype = weights.embedding.dtype
        self._weight_type = "int8" if is_int8 else str(self._dtype).removeprefix("torch.")
        self._decoder = native.Decoder(
            {
                "hidden_size": description.hidden_size,
                "intermediate_size": description.intermediate_size,
                "num_heads": description.num_heads,
                "num_kv_heads": description.num_kv_heads,
                "head_dim": description.head_dim,
                "eps": description.rms_norm_eps,
                # Rounded as the model's own code rounds it, to the dtype of what it multiplies.
                "embedding_scale": torch.tensor(
                    description.embedding_scale, dtype=self._dtype
                ).item(),
                "logit_soft_cap": description.logit_soft_cap or 0.0,
                "activation": description.activation,
            },
            weights.embedding.contiguous(),
            weights.final_norm,
            [_angles(tables) for tables in weights.ropes],
            [
                self._layer(kind, layer)
                for kind, layer in zip(description.layers, weights.layers, strict=True)
            ],
        )
        self._lm_head = None if weights.lm_head is None else self._packed(weights.lm_head)

    def new_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """See Decoder."""
        sizes = self.description.kv_sizes(num_blocks * block_size)
        like = torch.empty(0, dtype=self._dtype)
        return KVCaches(self._native.large_zeros(sizes, like), block_size)

    def hidden_states(
        self, token_ids: NDArray[np.int64], layout: StepLayout, caches: KVCaches
    ) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        arrays = (
            token_ids,
            layout.positions,
            layout.slots,
            layout.starts,
            layout.offsets,
            layout.block_tables,
        )
        step = self._native.Step(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))
        outcome: tuple[Tensor, Tensor]
        if self._shard.group is None:
            outcome = self._decoder.run(step, caches.tensor, caches.block_size)
            return outcome
        self._decoder.begin(step, caches.tensor, caches.block_size)
        for half in range(2 * self.description.num_layers):
            self._decoder.add(half, self._shard.sum(self._decoder.half(half)))
        outcome = self._decoder.end()
        return outcome

    def logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """See Decoder."""
        assert self._lm_head is not None, "only the first rank knows words"
        scores: Tensor = self._decoder.logits(self._lm_head, hidden, torch.from_numpy(rows))
        return scores

    def wipe(self, caches: KVCaches, slots: NDArray[np.int64]) -> None:
        """See Decoder."""
        self._native.wipe(caches.tensor, caches.block_size, torch.from_numpy(slots))

    def _layer(self, kind: LayerDescription, weights: LayerWeights) -> dict[str, object]:
        return {
            "input_norm": weights.input_norm,
            "qkv": self._packed(weights.qkv),
            "query_norm": weights.query_norm,
            "key_norm": weights.key_norm,
            "attention_out": self._packed(weights.attention_out),
            "attention_out_norm": weights.attention_out_norm,
            "mlp_norm": weights.mlp_norm,
            "gate_up": self._packed(weights.gate_up, is_gated=True),
            "down": self._packed(weights.down),
            "mlp_out_norm": weights.mlp_out_norm,
            "scale": kind.attention.scale,
            "window": kind.attention.window or 0,
            "soft_cap": kind.attention.soft_cap or 0.0,
            "rope": -1 if kind.rope is None else kind.rope,
        }

    def _packed(self, weights: LinearWeights, *, is_gated: bool = False) -> object:
        return self._native.PackedLinear(weights.weight, weights.bias, self._weight_type, is_gated)


def _angles(tables: RopeTables) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] of the tables of reference/rope.py."""
    cos, sin = tables
    return cos[:, 0].contiguous(), sin[:, 1].contiguous()
