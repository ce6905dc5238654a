from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of taking, sharing, giving back and blanking keeps the law of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        self.idle: list[int] = []

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        num_blank = NUM_BLOCKS - len(set(self.held)) - len(self.idle)
        assert self.pool.num_blank == num_blank
        blocks = self.pool.take(count)
        assert len(blocks) == len(set(blocks)) == min(count, num_blank)
        assert not {*blocks} & {*self.held, *self.idle}
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold_what_is_held(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.hold(block)
        self.held.append(block)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def hold_what_is_idle(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.idle))
        self.pool.hold(block)
        self.idle.remove(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        is_idle = self.pool.release(block)
        self.held.remove(block)
        assert is_idle == (block not in self.held)
        if is_idle:
            self.idle.append(block)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def blank(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.idle))
        self.pool.blank(block)
        self.idle.remove(block)

    @invariant()
    def law(self) -> None:
        self.pool.check(self.held, self.idle)
        counts = Counter(self.held)
        assert self.pool.num_held == len(counts)
        assert all(self.pool.num_holders(block) == count for block, count in counts.items())
        assert not any(self.pool.num_holders(block) for block in self.idle)


TestBlockPool = BlockPoolMachine.TestCase


def idle_block(pool: BlockPool) -> int:
    (block,) = pool.take(1)
    assert pool.release(block)
    return block


def test_a_block_released_twice_is_noticed() -> None:
    pool = BlockPool(2)
    block = idle_block(pool)
    with pytest.raises(AssertionError, match="without a holder"):
        pool.release(block)


def test_a_blank_block_can_be_neither_held_nor_blanked_again() -> None:
    pool = BlockPool(2)
    block = idle_block(pool)
    pool.blank(block)
    with pytest.raises(AssertionError, match="blank"):
        pool.hold(block)
    with pytest.raises(AssertionError, match="blank"):
        pool.num_holders(block)
    with pytest.raises(AssertionError, match="not idle"):
        pool.blank(block)


def test_a_held_block_is_never_blanked() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="not idle"):
        pool.blank(block)


def test_an_idle_block_is_given_to_nobody() -> None:
    pool = BlockPool(1)
    block = idle_block(pool)
    assert pool.take(1) == []
    pool.blank(block)
    assert pool.take(1) == [block]


def test_a_blanked_block_rests_as_long_as_it_can() -> None:
    pool = BlockPool(3)
    block = idle_block(pool)
    pool.blank(block)
    assert pool.take(3)[-1] == block


def test_books_that_differ_from_the_pool_are_noticed() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.check([block], [])
    for held, idle in (([], []), ([block, block], []), ([], [block]), ([block], [block])):
        with pytest.raises(AssertionError):
            pool.check(held, idle)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
