"""What one step computes, as plain values: all that execution ever learns of the schedule.

A step is laid out in arrays, one entry per row, because a step of hundreds of decoding
sequences must not cost hundreds of objects. A row is one sequence's part of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from engine.interface.block_move import BlockMove
from engine.interface.sampling_params import SamplingParams

# Stands where a token belongs that the row's slot samples in the step before this one.
PENDING = -1


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSpec:
    """What never changes about a sequence while it runs; one object for all its steps."""

    request_id: str
    choice: int
    num_prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One row, taken out of the arrays for whoever works row by row.

    `token_ids` stand at positions start .. start + len(token_ids) - 1 and get their KV in the
    slots that `block_table` names (token i: block i // block_size). When `is_sampled`, these
    are the last tokens known, and the token after them is wanted.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    is_sampled: bool
    num_prompt_tokens: int
    sampling: SamplingParams

    @property
    def end(self) -> int:
        """Tokens with KV after this step; also the position of a token sampled by it."""
        return self.start + len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that precede the one sampled by this step."""
        return self.end - self.num_prompt_tokens


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """One step's work; each sequence has at most one row.

    `moves` come first. Row r computes `counts[r]` tokens from position `starts[r]`; the rows'
    tokens lie one after another in `token_ids`. In `block_tables[r]` the numbers behind the
    blocks that the row reads and writes mean nothing. `slots[r]` is the row's place among the
    running sequences, its own from joining to leaving. `epochs[r]` tells the sequence from
    whoever held that slot before.

    Some rows need more, and only they are in the mappings. `histories[r]` is all tokens known
    of a sampled row's sequence, prompt first: penalties ask for tokens whose KV may have come
    from the prefix cache. `targets[r]` are the tokens that follow the row's first tokens, one
    by one: the model's opinion of each is wanted.
    """

    moves: tuple[BlockMove, ...]
    specs: tuple[SequenceSpec, ...]
    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    is_sampled: NDArray[np.bool_]
    histories: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    targets: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Sequences that this step computes."""
        return len(self.specs)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, not even a move."""
        return not self.specs and not self.moves

    @property
    def ends(self) -> NDArray[np.int64]:
        """Per row, the tokens with KV after this step."""
        return self.starts + self.counts

    def sequences(self, block_size: int) -> tuple[ScheduledSequence, ...]:
        """The rows one by one, each with exactly the blocks that it reads and writes."""
        widths = -(-self.ends // block_size)
        offsets = np.concatenate(([0], np.cumsum(self.counts)))
        return tuple(
            ScheduledSequence(
                request_id=spec.request_id,
                choice=spec.choice,
                token_ids=tuple(self.token_ids[offsets[row] : offsets[row + 1]].tolist()),
                start=int(self.starts[row]),
                block_table=tuple(self.block_tables[row, : widths[row]].tolist()),
                is_sampled=bool(self.is_sampled[row]),
                num_prompt_tokens=spec.num_prompt_tokens,
                sampling=spec.sampling,
            )
            for row, spec in enumerate(self.specs)
        )

    def with_sampled(
        self, before: "SchedulerOutput", sampled: NDArray[np.int64]
    ) -> "SchedulerOutput":
        """The same step with every PENDING token filled in.

        `sampled` has one token per row of the step `before`. A row that failed there has none;
        what follows it here is computed with any token, and nobody listens to it.
        """
        is_pending = self.token_ids == PENDING
        if not is_pending.any():
            return self
        by_slot = np.full(1 + max(self.slots.max(), before.slots.max()), PENDING)
        by_slot[before.slots] = np.maximum(sampled, 0)
        token_ids = self.token_ids.copy()
        token_ids[is_pending] = by_slot[np.repeat(self.slots, self.counts)[is_pending]]
        histories = {
            row: np.where(history == PENDING, by_slot[self.slots[row]], history)
            for row, history in self.histories.items()
        }
        return replace(self, token_ids=token_ids, histories=histories)
