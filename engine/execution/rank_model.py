"""One rank's part of every step: its share of the model, and of the KV cache that it fills.

All ranks do the same with the same numbers: they move the same blocks, write the same slots,
and, since hidden states are equal on all of them, wipe the same broken rows.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.block_mover import BlockMover
from engine.execution.ranks.rank_step import RankStep
from engine.layers.step_layout import StepLayout, step_layout
from engine.models.decoder import Decoder
from engine.scheduling.scheduler_output import SchedulerOutput

StepInputs = SchedulerOutput | RankStep


class RankModel:
    """A decoder, or one rank's share of it, and its cache. Call it in inference mode."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, num_host_blocks: int
    ) -> None:
        self.decoder = decoder
        self._caches = decoder.new_caches(num_blocks, block_size)
        self._mover = BlockMover(self._caches.tensor, block_size, num_host_blocks)

    def compute(self, step: StepInputs) -> None:
        """All of a step but its words."""
        self.move(step)
        if len(step.counts):
            self.hidden_states(step)

    def move(self, step: StepInputs) -> float:
        """Carry out the step's moves, which come first; the seconds they took."""
        return self._mover.carry_out(step.moves) if step.moves else 0.0

    def hidden_states(self, step: StepInputs) -> tuple[StepLayout, Tensor, list[int]]:
        """Where the step's tokens stand, their last hidden states [tokens, hidden], broken rows.

        A row is broken if it has a NaN or infinity in this step; what it wrote is wiped at once.
        """
        layout = step_layout(step.starts, step.counts, step.block_tables, self._caches.block_size)
        hidden, is_finite = self.decoder.hidden_states(step.token_ids, layout, self._caches)
        return layout, hidden, self._wiped(layout, ~is_finite.numpy())

    def _wiped(self, layout: StepLayout, is_broken: NDArray[np.bool_]) -> list[int]:
        if not is_broken.any():
            return []
        rows = np.unique(layout.rows[is_broken])
        self.decoder.wipe(self._caches, layout.slots[np.isin(layout.rows, rows)])
        broken: list[int] = rows.tolist()
        return broken
