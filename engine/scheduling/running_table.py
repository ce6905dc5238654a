"""The running sequences, laid out in arrays: one slot each, from joining to leaving.

What a step asks of every sequence is asked of whole arrays; only what happens to few of them
(a new block, a prompt, an end) is done one by one.
"""

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.sequence import Sequence

# Added to the order of a batch-class sequence: it ranks behind every interactive one.
_BEHIND_ALL_INTERACTIVE = 1 << 48


class RunningTable:
    """Arrays by slot. A slot whose `is_used` is false means nothing.

    `num_told` tokens are known, `num_known` will be when the steps in flight end; `num_scheduled`
    of those have KV then, `num_computed` have it already. `is_started` says that a step with it
    has ended. `capacity` is how many the sequence's blocks can take, `max_tokens` how many it can
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
        self.is_started = np.zeros(num_slots, np.bool_)
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
        self.last_served = np.zeros(num_slots, np.int64)
        self.rank = np.zeros(num_slots, np.int64)
        self.epoch = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_slots, 16), np.int32)
        self.specs = np.full(num_slots, None, np.object_)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.tables: list[BlockTable | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Sequence, int] = {}

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

    @property
    def used_slots(self) -> list[int]:
        """The slots of all running sequences, oldest first."""
        return list(self._slots.values())

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
        self.tables[slot] = table
        self.is_used[slot] = True
        self.is_interactive[slot] = sequence.is_interactive
        self.is_guaranteed[slot] = table.is_guaranteed
        self.is_started[slot] = False
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
        table = self.table(slot)
        del self._slots[self.sequence(slot)]
        self.sequences[slot] = self.tables[slot] = self.specs[slot] = None
        self.is_used[slot] = False
        self.epoch[slot] += 1
        self._free.append(slot)
        return table

    def see_blocks(self, slot: int) -> None:
        """Mirror what has changed in a slot's block table."""
        table = self.table(slot)
        blocks, seen = table.blocks, table.num_seen
        if len(blocks) > self.block_tables.shape[1]:
            wider = np.zeros((len(self.sequences), 2 * len(blocks)), np.int32)
            wider[:, : self.block_tables.shape[1]] = self.block_tables
            self.block_tables = wider
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
            assert self.num_told[slot] == len(sequence.token_ids)
            assert 0 <= self.num_known[slot] - self.num_told[slot] <= 1
            assert self.num_computed[slot] <= self.num_scheduled[slot] <= self.num_known[slot]
            assert self.capacity[slot] == len(table.blocks) * self._block_size
            assert self.num_scheduled[slot] <= self.capacity[slot]
            assert self.block_tables[slot, : len(table.blocks)].tolist() == table.blocks
            assert self.last_token[slot] == sequence.token_ids[-1]
        assert int(self.is_used.sum()) == len(self._slots)
