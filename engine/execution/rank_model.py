"""One rank's part of every step: its share of the model, and of the KV cache that it fills.

All ranks do the same with the same numbers: they move the same blocks, write the same slots,
and, since hidden states are equal on all of them, wipe the same broken rows.
"""

import numpy as np
import torch
from torch import Tensor

from engine.execution.block_mover import BlockMover
from engine.execution.ranks.rank_step import RankStep
from engine.layers.attention import CacheShape, attention_batch
from engine.layers.step_layout import StepLayout, step_layout
from engine.models.decoder import Decoder
from engine.scheduling.scheduler_output import SchedulerOutput

StepInputs = SchedulerOutput | RankStep


class RankModel:
    """A decoder, or one rank's share of it, and its cache. Call it in inference mode.

    The cache is [layers, 2 x kv_heads, num_blocks x block_size, head_dim], with the KV heads
    that are computed here. It holds finite numbers only: attention masks stale places but still
    multiplies them.
    """

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, num_host_blocks: int
    ) -> None:
        description = decoder.description
        self.decoder = decoder
        self._shape = CacheShape(
            description.num_kv_heads, num_blocks, block_size, description.head_dim
        )
        self._caches = torch.zeros(
            description.num_layers,
            2 * description.num_kv_heads,
            num_blocks * block_size,
            description.head_dim,
            dtype=decoder.dtype,
        )
        self._mover = BlockMover(self._caches, block_size, num_host_blocks)

    def compute(self, step: StepInputs) -> None:
        """All of a step but its words."""
        self.move(step)
        if len(step.counts):
            self.wipe_broken_rows(*self.hidden_states(step))

    def move(self, step: StepInputs) -> float:
        """Carry out the step's moves, which come first; the seconds they took."""
        return self._mover.carry_out(step.moves) if step.moves else 0.0

    def hidden_states(self, step: StepInputs) -> tuple[StepLayout, Tensor]:
        """The last hidden states [tokens, hidden] of the step, and where its tokens stand."""
        layout = step_layout(step.starts, step.counts, step.block_tables, self._shape.block_size)
        windows = self.decoder.description.windows
        hidden = self.decoder.hidden_states(
            torch.from_numpy(step.token_ids),
            torch.from_numpy(layout.positions),
            attention_batch(layout, self._shape, self.decoder.dtype, windows),
            self._caches,
        )
        return layout, hidden

    def wipe_broken_rows(self, layout: StepLayout, hidden: Tensor) -> list[int]:
        """Rows with a NaN or infinity in this step; what they wrote is wiped at once."""
        is_broken = ~hidden.isfinite().all(dim=-1).numpy()
        if not is_broken.any():
            return []
        rows = np.unique(layout.rows[is_broken])
        written = layout.slots[np.isin(layout.rows, rows)]
        self._caches[:, :, torch.from_numpy(written)] = 0
        broken: list[int] = rows.tolist()
        return broken
