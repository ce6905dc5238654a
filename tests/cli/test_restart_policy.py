"""The wait between two starts of a child that keeps dying."""

from hypothesis import given
from hypothesis import strategies as st

from cli.restart_policy import RestartPolicy

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0, stable_after_s=60.0)


def test_each_failure_in_a_row_doubles_the_wait_up_to_the_cap() -> None:
    delays = [POLICY.delay_s(failures) for failures in range(1, 9)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_stable_run_forgives_the_failures_before_it() -> None:
    assert POLICY.failures_after(7, ran_for_s=59.9) == 8
    assert POLICY.failures_after(7, ran_for_s=60.0) == 1


@given(failures=st.integers(1, 10**9))
def test_no_number_of_failures_exceeds_the_cap_or_shortens_the_wait(failures: int) -> None:
    delay_s = POLICY.delay_s(failures)

    assert 0 < delay_s <= POLICY.max_delay_s
    assert delay_s <= POLICY.delay_s(failures + 1)
