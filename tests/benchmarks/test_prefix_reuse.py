"""What sharing beginnings saves is exact, so its bars hold everywhere."""

from benchmarks.prefix_reuse import measure


def test_beginnings_are_computed_once_and_nothing_is_lost() -> None:
    result = measure(num_cycles=100)
    assert result.is_met, result.table()
