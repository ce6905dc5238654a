from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of taking, sharing and giving back keeps the law of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        num_free = self.pool.num_free
        blocks = self.pool.try_allocate(count)
        if count > num_free:
            assert blocks is None
        else:
            assert blocks is not None
            assert not set(blocks) & set(self.held)
            self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.share([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release([block])
        self.held.remove(block)

    @invariant()
    def law(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_free == NUM_BLOCKS - len(Counter(self.held))


TestBlockPool = BlockPoolMachine.TestCase


def test_a_block_released_twice_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
