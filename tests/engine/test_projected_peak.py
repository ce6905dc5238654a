"""The projected peak is what counting block by block finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.projected_peak import projected_peak

Sequences = list[tuple[int, int]]


def peak_of(sequences: Sequences) -> int:
    held, missing = np.array(sequences, dtype=np.int64).reshape(-1, 2).T
    return projected_peak(held, missing)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_the_peak_is_the_most_that_is_held_at_any_moment(sequences: Sequences) -> None:
    most = 0
    for moment in range(51):
        most = max(most, sum(held + moment for held, missing in sequences if missing >= moment))
    assert peak_of(sequences) == most


def test_a_sequence_that_ends_early_makes_room_for_one_that_ends_late() -> None:
    # In the end they come to 30 blocks, but never together.
    assert peak_of([(10, 1), (1, 18)]) == 19
    assert peak_of([]) == 0
