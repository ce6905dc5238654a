import pytest

from engine.kv_cache.kv_cache_manager import KVCacheManager, SequenceId

ONE, TWO = SequenceId("one", 0), SequenceId("two", 0)


def test_a_sequence_joins_only_beside_what_the_running_ones_may_become() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    assert cache.try_admit(ONE, max_tokens=9)
    assert cache.num_free_blocks == 4
    assert cache.num_projected_free_tokens == 4
    assert not cache.try_admit(TWO, max_tokens=5)
    assert cache.try_admit(TWO, max_tokens=4)
    cache.check({ONE, TWO})


def test_blocks_come_as_tokens_do_and_leave_all_at_once() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    cache.try_admit(ONE, max_tokens=12)
    assert len(cache.allocate(ONE, 4)) == 1
    first = cache.allocate(ONE, 5)
    assert len(first) == 2
    assert cache.allocate(ONE, 8) == first
    assert cache.num_free_blocks == 2
    cache.free(ONE)
    assert cache.num_free_blocks == 4
    assert cache.num_projected_free_tokens == 16
    cache.check(set())


def test_growing_beyond_the_projection_is_noticed() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    cache.try_admit(ONE, max_tokens=4)
    with pytest.raises(AssertionError):
        cache.allocate(ONE, 5)


def test_a_sequence_larger_than_the_cache_can_never_fit() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    assert cache.can_ever_fit(16)
    assert not cache.can_ever_fit(17)
