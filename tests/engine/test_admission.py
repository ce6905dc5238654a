import numpy as np
import pytest

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.admission import (
    MAX_PREEMPTIONS,
    Admission,
    must_be_guaranteed,
)
from engine.scheduling.sequence import Sequence
from tests.engine.sequences import BLOCK_SIZE, Expecting, sequence

NUM_BLOCKS = 100
HIGH, LOW = 95, 90
NOBODY = Growth(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)


def admission(expected: int = 1_000_000) -> tuple[Admission, KVCacheManager]:
    cache = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    return Admission(cache, Expecting(expected), 0.95, 0.90), cache


def one_that_holds(held: int, missing: int = 0) -> Growth:
    return Growth(np.array([held]), np.array([missing]), 0)


def with_prompt_of(num_blocks: int) -> Sequence:
    """A sequence whose prompt fills so many blocks, but for one token to come."""
    return sequence((1,) * (num_blocks * BLOCK_SIZE - 1), max_tokens=1)


def growing_to(num_blocks: int, num_preemptions: int = 0) -> Sequence:
    """A sequence with a short prompt that can come to so many blocks."""
    return sequence(max_tokens=num_blocks * BLOCK_SIZE - 3, num_preemptions=num_preemptions)


def test_alone_everybody_may_join_who_fits_at_all() -> None:
    entry, _ = admission()
    assert entry.may_join(with_prompt_of(NUM_BLOCKS), NOBODY)
    assert entry.may_join(growing_to(NUM_BLOCKS), NOBODY)


def test_a_newcomer_leaves_some_blocks_unpromised() -> None:
    entry, _ = admission()
    assert entry.may_join(with_prompt_of(HIGH - 50), one_that_holds(50))
    assert not entry.may_join(with_prompt_of(HIGH - 49), one_that_holds(50))
    assert not entry.may_join(growing_to(HIGH - 49), one_that_holds(10, missing=50))


def test_what_is_expected_counts_and_not_what_may_come() -> None:
    entry, _ = admission(expected=5)
    assert entry.may_join(growing_to(90), one_that_holds(50, missing=40))
    assert entry.expected_tokens(growing_to(90)) == 3 + 5


def test_who_ends_early_gives_its_blocks_to_who_grows_on() -> None:
    entry, _ = admission()
    # It leaves with its next block; the newcomer needs its 80 only later.
    assert entry.may_join(growing_to(80), one_that_holds(60, missing=1))
    assert not entry.may_join(growing_to(80), one_that_holds(60, missing=60))


def test_after_a_preemption_nobody_joins_until_the_projection_is_low() -> None:
    entry, _ = admission()
    small = with_prompt_of(1)
    assert entry.may_join(small, one_that_holds(HIGH - 1))
    entry.note_shortage()
    entry.note_projection(one_that_holds(HIGH - 1))
    assert not entry.may_join(small, one_that_holds(HIGH - 1))
    assert not entry.may_join(small, one_that_holds(LOW + 1))
    assert entry.may_join(small, one_that_holds(LOW - 1))
    assert not entry.may_join(small, one_that_holds(HIGH - 1)), "nothing has changed yet"
    entry.note_projection(one_that_holds(LOW))
    assert entry.may_join(small, one_that_holds(HIGH - 1)), "the shortage is over"
    entry.note_shortage()
    assert not entry.may_join(small, one_that_holds(HIGH - 1))


def test_after_three_preemptions_a_sequence_joins_only_with_a_guarantee() -> None:
    entry, cache = admission(expected=1)
    often = growing_to(60, num_preemptions=MAX_PREEMPTIONS)
    assert must_be_guaranteed(often)
    assert not must_be_guaranteed(growing_to(60, num_preemptions=MAX_PREEMPTIONS - 1))
    assert entry.expected_tokens(often) == often.max_tokens
    table = entry.open(often)
    assert table.is_guaranteed
    assert table.num_projected_blocks == 60
    assert not cache.can_guarantee(41 * BLOCK_SIZE)
    second = growing_to(41, num_preemptions=MAX_PREEMPTIONS)
    assert not entry.may_join(second, one_that_holds(1))
    assert not entry.may_join(second, NOBODY)
    cache.close(table, 0)
    assert entry.may_join(second, one_that_holds(1))


def test_an_outgrown_projection_is_corrected_and_a_guarantee_never() -> None:
    entry, _ = admission(expected=2)
    one = growing_to(60)
    table = entry.open(one)
    assert table.num_projected_blocks == 2
    one.token_ids += [1] * 20
    entry.project_again(one, table)
    assert table.num_projected_blocks == 6
    often = growing_to(20, num_preemptions=MAX_PREEMPTIONS)
    guaranteed = entry.open(often)
    entry.project_again(often, guaranteed)
    assert guaranteed.num_projected_blocks == 20


@pytest.mark.parametrize("scope", ["scope", "other"])
def test_blocks_shared_with_who_runs_are_not_counted_twice(scope: str) -> None:
    entry, cache = admission()
    prompt = tuple(range(1, 202))
    running = sequence(prompt, max_tokens=3)
    table = entry.open(running)
    assert cache.try_grow(table, 200)
    cache.record(table, 200)
    newcomer = sequence((*prompt, 9), max_tokens=2, scope=scope)
    # 51 blocks beside 50, of which 50 are the same.
    assert entry.may_join(newcomer, one_that_holds(50)) == (scope == "scope")
