"""The running sequences, laid out in arrays: one slot each, from joining to leaving.

What a step asks of every sequence is asked of whole arrays; only what happens to few of them
(a prompt, an end) is done one by one. So a sequence does not get its tokens one by one either:
they stay in the table until somebody needs the sequence's own list, at the latest when a block
is full.
"""

from collections import Counter
from math import nan

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.sequence import Sequence

# Added to the order of a batch-class sequence: it ranks behind every interactive one.
_BEHIND_ALL_INTERACTIVE = 1 << 48
# Stop tokens, of all that run, that are looked for one by one; more of them in a sorted set.
MAX_COMPARED = 8


class RunningTable:
    """Arrays by slot. A slot whose `is_used` is false means nothing.

    `num_told` tokens are known, `num_known` will be when the steps in flight end; `num_scheduled`
    of those have KV then, `num_computed` have it already. `scheduled_at` is nan until a step with
    it has ended. `capacity` is how many the blocks can take, `max_tokens` how many it can
    ever have; the last of these never needs KV. `needs_history` is true where sampling does.
    `last_served` is the number of the last step that gave the sequence a decode, -1 before the
    first. `rank` orders by importance, smallest first. `epoch` rises whenever a slot changes
    hands.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self.is_used = np.zeros(num_slots, np.bool_)
        self.is_interactive = np.zeros(num_slots, np.bool_)
        self.is_guaranteed = np.zeros(num_slots, np.bool_)
        self.needs_history = np.zeros(num_slots, np.bool_)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.num_told = np.zeros(num_slots, np.int64)
        self.num_known = np.zeros(num_slots, np.int64)
        self.num_scheduled = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)
        self.num_projected_blocks = np.zeros(num_slots, np.int64)
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.num_cached_tokens = np.zeros(num_slots, np.int64)
        self.scheduled_at = np.full(num_slots, nan)
        self.last_served = np.zeros(num_slots, np.int64)
        self.rank = np.zeros(num_slots, np.int64)
        self.epoch = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_slots, 16), np.int32)
        self.specs = np.full(num_slots, None, np.object_)
        self.request_ids = np.full(num_slots, None, np.object_)
        self.choices = np.zeros(num_slots, np.int64)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.tables: list[BlockTable | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Sequence, int] = {}
        # Token i of a sequence stands in column i % width, until its own list has it.
        self._recent = np.zeros((num_slots, 2 * block_size), np.int64)
        # How many of the running sequences stop at these tokens.
        self._stop_ids: Counter[frozenset[int]] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._slots

    @property
    def num_due(self) -> NDArray[np.int64]:
        """By slot, how many of the tokens known so far need KV at all."""
        return np.minimum(self.num_known, self.max_tokens - 1)

    @property
    def num_free(self) -> int:
        """How many more can join."""
        return len(self._free)

    def slot_of(self, sequence: Sequence) -> int:
        """Where a running sequence stands."""
        return self._slots[sequence]

    def sequence(self, slot: int) -> Sequence:
        """Who stands in a used slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def table(self, slot: int) -> BlockTable:
        """The block table of a used slot."""
        table = self.tables[slot]
        assert table is not None, f"slot {slot} is free"
        return table

    def join(self, sequence: Sequence, table: BlockTable) -> int:
        """Give a sequence with an empty block table a slot."""
        slot = self._free.pop()
        self._slots[sequence] = slot
        self.sequences[slot] = sequence
        self.specs[slot] = sequence.spec
        self.request_ids[slot], self.choices[slot] = sequence.spec.request_id, sequence.spec.choice
        self._stop_ids[sequence.stop_ids] += 1
        self.tables[slot] = table
        self.is_used[slot] = True
        self.is_interactive[slot] = sequence.is_interactive
        self.is_guaranteed[slot] = table.is_guaranteed
        self.scheduled_at[slot] = nan if sequence.scheduled_at is None else sequence.scheduled_at
        self.num_cached_tokens[slot] = sequence.num_cached_tokens
        self.needs_history[slot] = sequence.history is not None
        self.num_prompt_tokens[slot] = sequence.spec.num_prompt_tokens
        self.num_known[slot] = self.num_told[slot] = len(sequence.token_ids)
        self.num_scheduled[slot] = self.num_computed[slot] = self.capacity[slot] = 0
        self.num_projected_blocks[slot] = table.num_projected_blocks
        self.max_tokens[slot] = sequence.max_tokens
        self.last_token[slot] = sequence.token_ids[-1]
        self.last_served[slot] = -1
        behind = 0 if sequence.is_interactive else _BEHIND_ALL_INTERACTIVE
        self.rank[slot] = sequence.order + behind
        return slot

    def growth(self, slots: NDArray[np.int64], num_shared: int) -> Growth:
        """What the sequences in these slots hold, and what they are expected to need."""
        size = self._block_size
        held = np.maximum(self.capacity[slots] // size, -(-self.num_known[slots] // size))
        missing = np.maximum(0, self.num_projected_blocks[slots] - held)
        return Growth(held, missing, num_shared)

    def leave(self, slot: int) -> BlockTable:
        """Free the slot; returns the block table, for somebody to close."""
        self.catch_up(slot)
        table, sequence = self.table(slot), self.sequence(slot)
        del self._slots[sequence]
        self._stop_ids[sequence.stop_ids] -= 1
        if not self._stop_ids[sequence.stop_ids]:
            del self._stop_ids[sequence.stop_ids]
        self.sequences[slot] = self.tables[slot] = None
        self.specs[slot] = self.request_ids[slot] = None
        self.is_used[slot] = False
        self.epoch[slot] += 1
        self._free.append(slot)
        return table

    def tell(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One more token is known of each of these."""
        self._recent[slots, self.num_told[slots] % self._recent.shape[1]] = token_ids
        self.num_told[slots] += 1
        self.last_token[slots] = token_ids

    def catch_up(self, *slots: int) -> None:
        """Give sequences the tokens that they were told of meanwhile."""
        width = self._recent.shape[1]
        places = list(slots)
        rows = zip(
            slots, self.num_told[places].tolist(), self._recent[places].tolist(), strict=True
        )
        for slot, num_told, recent in rows:
            token_ids = self.sequence(slot).token_ids
            num_new = num_told - len(token_ids)
            if num_new:
                start = len(token_ids) % width
                token_ids += (recent + recent)[start : start + num_new]

    def may_stop(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """False for tokens at which nobody who runs stops."""
        stop_ids = set().union(*self._stop_ids)
        if len(stop_ids) > MAX_COMPARED:
            return np.isin(token_ids, list(stop_ids))
        is_found = np.zeros(len(token_ids), np.bool_)
        for stop_id in stop_ids:
            is_found |= token_ids == stop_id
        return is_found

    def see_block_each(self, slots: NDArray[np.int64], blocks: list[int]) -> None:
        """Mirror that each of these block tables has got one more block."""
        places = self.capacity[slots] // self._block_size
        self._widen(int(places.max(initial=0)) + 1)
        self.block_tables[slots, places] = blocks
        self.capacity[slots] += self._block_size
        for slot in slots.tolist():
            self.table(slot).num_seen += 1

    def see_blocks(self, slot: int) -> None:
        """Mirror what has changed in a slot's block table."""
        table = self.table(slot)
        blocks, seen = table.blocks, table.num_seen
        self._widen(len(blocks))
        self.block_tables[slot, seen : len(blocks)] = blocks[seen:]
        table.num_seen = len(blocks)
        self.capacity[slot] = len(blocks) * self._block_size
        self.num_projected_blocks[slot] = table.num_projected_blocks

    def check(self) -> None:
        """The arrays say what the sequences and tables say."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(len(self.sequences)))
        for sequence, slot in self._slots.items():
            table = self.table(slot)
            assert self.is_used[slot]
            assert self.sequences[slot] is sequence
            self.catch_up(slot)
            assert self.num_told[slot] == len(sequence.token_ids)
            assert 0 <= self.num_known[slot] - self.num_told[slot] <= 1
            assert self.num_computed[slot] <= self.num_scheduled[slot] <= self.num_known[slot]
            assert self.capacity[slot] == len(table.blocks) * self._block_size
            assert self.num_scheduled[slot] <= self.capacity[slot]
            assert self.block_tables[slot, : len(table.blocks)].tolist() == table.blocks
            assert self.last_token[slot] == sequence.token_ids[-1]
        assert int(self.is_used.sum()) == len(self._slots)
        assert self._stop_ids == Counter(sequence.stop_ids for sequence in self._slots)

    def _widen(self, num_blocks: int) -> None:
        num_columns = self.block_tables.shape[1]
        if num_blocks > num_columns:
            wider = np.zeros((len(self.sequences), 2 * num_blocks), np.int32)
            wider[:, :num_columns] = self.block_tables
            self.block_tables = wider
