"""The hash model's own laws: what no step may do, and what a fault leaves behind."""

import pytest

from engine.execution.model_runner_output import NO_TOKEN
from engine.scheduling.scheduler_output import PENDING
from tests.engine.hash_runner import FAULT, HashRunner, next_token
from tests.engine.steps import Row, copy, load, offload, spec, step

A, B = spec("a", 3), spec("b", 3)


def test_two_rows_may_not_write_one_slot() -> None:
    with pytest.raises(AssertionError, match="two rows write"):
        HashRunner(4, 4).execute(step(Row(A, (1, 2), 0, (0,)), Row(B, (3,), 0, (0,))))


def test_a_row_may_not_read_what_another_writes_in_the_same_step() -> None:
    runner = HashRunner(4, 4)
    runner.execute(step(Row(A, (1, 2, 3, 4), 0, (0,), slot=0)))
    reader = Row(B, (5,), 4, (0, 1), slot=1)
    with pytest.raises(AssertionError, match="another writes"):
        runner.execute(step(Row(A, (9,), 3, (0,), slot=0), reader))
    assert runner.execute(step(reader)).token_ids.tolist() == [
        next_token([1, 2, 3, 4, 5], A.sampling.seed, 0)
    ]


def test_a_slot_beyond_a_rows_end_may_be_written_by_another() -> None:
    runner = HashRunner(4, 4)
    runner.execute(step(Row(A, (1, 2), 0, (0,), slot=0)))
    runner.execute(step(moves=[copy(0, 1)]))
    output = runner.execute(
        step(Row(A, (3,), 2, (0,), slot=0), Row(B, (4,), 2, (1,), slot=1)),
    )
    assert output.token_ids.tolist() == [next_token([1, 2, 3], 0, 0), next_token([1, 2, 4], 0, 0)]


def test_nothing_unwritten_is_read_or_moved() -> None:
    runner = HashRunner(4, 4, 2)
    with pytest.raises(AssertionError, match="never written"):
        runner.execute(step(Row(A, (1,), 1, (0,), is_sampled=False)))
    for move in (copy(2, 3), offload(2, 0), load(1, 3)):
        with pytest.raises(AssertionError, match="empty block"):
            runner.execute(step(moves=[move]))
    for move in (copy(0, 4), copy(4, 0), offload(0, 2), load(2, 0)):
        with pytest.raises(AssertionError):
            runner.execute(step(moves=[move]))


def test_nobody_is_computed_with_a_pending_token_or_under_anothers_name() -> None:
    runner = HashRunner(4, 4)
    with pytest.raises(AssertionError, match="waits for a token"):
        runner.execute(step(Row(A, (PENDING,), 0, (0,))))
    with pytest.raises(AssertionError, match="one slot"):
        runner.execute(step(Row(A, (1,), 0, (0,), slot=2), Row(B, (1,), 0, (1,), slot=2)))
    runner.execute(step(Row(A, (1,), 0, (0,), slot=2, epoch=5)))
    with pytest.raises(AssertionError, match="changed its spec"):
        runner.execute(step(Row(B, (1,), 0, (0,), slot=2, epoch=5)))
    runner.execute(step(Row(B, (1,), 0, (0,), slot=2, epoch=6)))


def test_a_fault_fails_its_row_alone_and_the_step_behind_it_is_tolerated_once() -> None:
    runner = HashRunner(4, 4, faults=[("a", 0, 2)])
    healthy = runner.execute(step(Row(B, (4, 5, 6), 0, (1,), slot=1))).token_ids.tolist()
    output = runner.execute(step(Row(A, (1, 2, 3), 0, (0,), slot=0), Row(B, (7,), 3, (1,), slot=1)))
    assert output.errors == {0: FAULT}
    assert output.token_ids.tolist() == [NO_TOKEN, next_token([4, 5, 6, 7], 0, 0)]
    late = Row(A, (0,), 3, (0,), slot=0)
    assert not runner.execute(step(late)).errors
    with pytest.raises(AssertionError, match="after it failed"):
        runner.execute(step(late))
    assert runner.execute(step(Row(B, (4, 5, 6), 0, (2,), slot=2))).token_ids.tolist() == healthy


def test_what_a_failed_row_left_is_read_by_nobody() -> None:
    runner = HashRunner(4, 4, 1, faults=[("a", 0, 3)])
    runner.execute(step(Row(A, (1, 2, 3, 4), 0, (0,), slot=0)))
    runner.execute(step(Row(A, (0,), 4, (0, 2), slot=0), moves=[offload(0, 0), load(0, 1)]))
    for table in [(0, 3), (1, 3)]:
        with pytest.raises(AssertionError, match="failed row left"):
            runner.execute(step(Row(B, (5,), 4, table, slot=1)))
    runner.execute(step(Row(B, (1, 2, 3, 4), 0, (0,), slot=1)))
