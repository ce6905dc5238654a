import numpy as np
import pytest

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduling.running_table import RunningTable
from engine.scheduling.sequence import Sequence
from tests.engine.sequences import BLOCK_SIZE, sequence


class Table:
    """A running table and a cache that gives its sequences their blocks."""

    def __init__(self, num_slots: int = 3, num_blocks: int = 128) -> None:
        self.cache = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.running = RunningTable(num_slots, BLOCK_SIZE)

    def join(self, one: Sequence, num_tokens: int | None = None) -> int:
        expected = one.max_tokens if num_tokens is None else num_tokens
        table = self.cache.open(one.prefix, expected, is_guaranteed=False)
        return self.running.join(one, table)

    def cover(self, slot: int, num_tokens: int) -> None:
        assert self.cache.try_grow(self.running.table(slot), num_tokens)
        self.running.see_blocks(slot)

    def leave(self, one: Sequence) -> None:
        table = self.running.leave(self.running.slot_of(one))
        self.cache.close(table, 0)


def test_a_sequence_has_one_slot_from_joining_to_leaving() -> None:
    table = Table()
    running = table.running
    first, second = sequence(name="first"), sequence(name="second", order=1)
    slots = table.join(first), table.join(second)
    assert len(set(slots)) == len(running) == 2
    assert running.num_free == 1
    assert [running.slot_of(first), running.slot_of(second)] == list(slots)
    assert running.sequence(slots[1]) is second
    assert first in running
    table.leave(first)
    assert first not in running
    assert running.slot_of(second) == slots[1]
    assert running.num_free == 2
    with pytest.raises(AssertionError, match="free"):
        running.sequence(slots[0])
    running.check()


def test_who_follows_in_a_slot_is_told_from_who_was_there() -> None:
    table = Table(num_slots=1)
    running = table.running
    epochs = []
    for name in ("first", "second", "third"):
        one = sequence(name=name)
        slot = table.join(one)
        epochs.append(int(running.epoch[slot]))
        table.cover(slot, 5)
        running.check()
        table.leave(one)
    assert len(set(epochs)) == 3


def test_a_newcomer_owes_all_of_its_tokens_and_has_no_blocks() -> None:
    table = Table()
    running = table.running
    one = sequence((1, 2, 3), resumed=(7, 8), max_tokens=9)
    slot = table.join(one)
    assert running.num_known[slot] == running.num_told[slot] == 5
    assert running.num_scheduled[slot] == running.num_computed[slot] == 0
    assert running.capacity[slot] == 0
    assert running.num_prompt_tokens[slot] == 3
    assert running.max_tokens[slot] == 12
    assert running.last_token[slot] == 8


def test_batch_class_ranks_behind_every_interactive_sequence() -> None:
    table = Table()
    slots = [
        table.join(sequence(name="batch", order=0, is_interactive=False)),
        table.join(sequence(name="late", order=900)),
        table.join(sequence(name="early", order=5)),
    ]
    assert sorted(slots, key=lambda slot: table.running.rank[slot]) == [
        slots[2],
        slots[1],
        slots[0],
    ]


def test_blocks_are_mirrored_however_many_there_are() -> None:
    table = Table()
    running = table.running
    long, short = sequence(max_tokens=400), sequence(name="b", order=1)
    slot, other = table.join(long), table.join(short)
    table.cover(other, 6)
    for num_tokens in (1, 4, 5, 64, 65, 300):
        table.cover(slot, num_tokens)
        blocks = running.table(slot).blocks
        assert running.block_tables[slot, : len(blocks)].tolist() == blocks
        assert running.capacity[slot] == len(blocks) * BLOCK_SIZE
        running.check()


def test_a_block_that_was_replaced_is_mirrored_again() -> None:
    table = Table()
    running = table.running
    slot = table.join(sequence())
    table.cover(slot, 12)
    blocks = running.table(slot)
    blocks.replace(1, 77)
    with pytest.raises(AssertionError):
        running.check()
    running.see_blocks(slot)
    running.check()


def test_growth_counts_a_prompt_as_held_and_the_rest_as_missing() -> None:
    table = Table()
    running = table.running
    slot = table.join(sequence((1,) * 9, max_tokens=20), num_tokens=25)
    growth = running.growth(np.array([slot]), 0)
    assert growth.held.tolist() == [3]
    assert growth.missing.tolist() == [4]
    table.cover(slot, 28)
    growth = running.growth(np.array([slot]), 0)
    assert growth.held.tolist() == [7]
    assert growth.missing.tolist() == [0]
    assert not len(running.growth(np.array([], np.int64), 0).held)
