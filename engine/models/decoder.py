"""What a decoder-only transformer is to the engine, and what it is made of.

One pass takes the rows of one step, whatever sequences they belong to, and gives their last
hidden states. There is no state but the weights; the KV cache comes in as an argument.

The weights may be one rank's share: the description then counts the heads of that share, and
both halves of a layer end in a sum over ranks (`engine/layers/shard.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.kv_caches import KVCaches
from engine.layers.step_layout import StepLayout
from engine.models.description import DecoderDescription


class Decoder(Protocol):
    """The model; `description` counts the heads that are computed here."""

    description: DecoderDescription

    def new_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """An empty KV cache of the shape and dtype that this decoder fills."""

    def hidden_states(
        self, token_ids: NDArray[np.int64], layout: StepLayout, caches: KVCaches
    ) -> tuple[Tensor, Tensor]:
        """Normalised states [tokens, hidden] of the step's tokens, and which are finite [tokens].

        Their keys and values go into the caches.
        """

    def logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Scores [rows, vocab] of the tokens that follow these rows of hidden states.

        They may be overwritten by the next call.
        """

    def wipe(self, caches: KVCaches, slots: NDArray[np.int64]) -> None:
        """Zero what these slots hold, in all layers."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """y = x W^T + b: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one block. `qkv` and `gate_up` are fused: one product instead of several.

    A norm that a model does not have is None.
    """

    input_norm: Tensor
    qkv: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: LinearWeights
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights
    mlp_out_norm: Tensor | None


RopeTables = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """Everything that was learned, or one rank's share of it, in the dtype to compute in.

    `layers` can be walked through once, and loads as it goes: whoever lays weights out anew holds
    one layer twice, not the model. Rope tables are [positions, 2, head_dim / 2] in float32, as
    `kernels/reference/rope.py` makes them. Only the first rank has output weights, `lm_head`.
    """

    embedding: Tensor
    layers: Iterable[LayerWeights]
    final_norm: Tensor
    lm_head: LinearWeights | None
    ropes: Sequence[RopeTables]
