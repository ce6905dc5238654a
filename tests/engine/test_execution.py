import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.execution.execution import Execution, InlineExecution, ThreadedExecution
from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.runner import ModelLimits
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.hash_runner import HashRunner, next_token
from tests.engine.steps import Row, spec, step

WAIT_S = 30


class GatedRunner:
    """Computes when the gate is open, and remembers on which thread."""

    limits = ModelLimits(10, 10, frozenset({0}))

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        assert self.gate.wait(WAIT_S)
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error
        return ModelRunnerOutput(work.token_ids)


def one_token(token_id: int, start: int = 0) -> SchedulerOutput:
    return step(Row(spec(), (token_id,), start, (1,)))


@pytest.fixture(params=["late", "eager", "threaded"])
def hashing(request: pytest.FixtureRequest) -> Iterator[Execution]:
    runner = HashRunner(4, 4)
    executions: dict[str, Execution] = {
        "late": InlineExecution(runner),
        "eager": InlineExecution(runner, is_eager=True),
        "threaded": ThreadedExecution(runner),
    }
    yield executions[request.param]
    for execution in executions.values():
        execution.close()


def test_steps_come_out_in_the_order_they_went_in(hashing: Execution) -> None:
    a_spec, context = spec(), [1]
    for start in range(8):
        hashing.start(step(Row(a_spec, (context[-1],), start, (2, 3))))
        context.append(int(hashing.finish().token_ids[0]))
    assert context[1:] == [next_token(context[:end], 0, 0) for end in range(1, 9)]


def test_at_most_one_step_is_in_flight(hashing: Execution) -> None:
    with pytest.raises(AssertionError):
        hashing.finish()
    hashing.start(one_token(1))
    with pytest.raises(AssertionError):
        hashing.start(one_token(1))
    hashing.finish()
    with pytest.raises(AssertionError):
        hashing.finish()


def test_finish_raises_what_the_runner_raised_and_the_next_step_runs(hashing: Execution) -> None:
    hashing.start(step(Row(spec(), (1,), 3, (1,))))
    with pytest.raises(AssertionError, match="never written"):
        hashing.finish()
    hashing.start(step(Row(spec(), (1,), 0, (1,), slot=9)))
    assert hashing.finish().token_ids.tolist() == [next_token([1], 0, 0)]


def test_closing_twice_is_closing_once(hashing: Execution) -> None:
    hashing.start(one_token(1))
    hashing.close()
    hashing.close()


@pytest.mark.parametrize(("is_eager", "num_before"), [(False, 0), (True, 1)])
def test_an_inline_execution_computes_late_or_early_as_told(
    is_eager: bool, num_before: int
) -> None:
    runner = HashRunner(4, 4)
    execution = InlineExecution(runner, is_eager=is_eager)
    execution.start(one_token(1))
    assert len(runner.steps) == num_before
    execution.finish()
    assert len(runner.steps) == 1


def test_a_threaded_step_runs_beside_the_caller() -> None:
    runner = GatedRunner()
    execution = ThreadedExecution(runner)
    execution.start(one_token(7))
    assert runner.threads == []
    runner.gate.set()
    assert execution.finish().token_ids.tolist() == [7]
    assert [thread.name for thread in runner.threads] == ["execution"]
    assert runner.threads[0].daemon
    execution.close()
    assert not runner.threads[0].is_alive()


def test_closing_waits_for_the_step_in_flight_and_drops_it() -> None:
    runner = GatedRunner(error=RuntimeError("lost with the step"))
    execution = ThreadedExecution(runner)
    execution.start(one_token(7))
    runner.gate.set()
    execution.close()
    assert len(runner.threads) == 1
    assert not runner.threads[0].is_alive()
    with pytest.raises(AssertionError):
        execution.start(one_token(7))
    with pytest.raises(AssertionError):
        execution.finish()


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_a_threaded_step_reaches_finish(error: BaseException) -> None:
    runner = GatedRunner(error=error)
    runner.gate.set()
    execution = ThreadedExecution(runner)
    for _ in range(2):
        execution.start(one_token(7))
        with pytest.raises(type(error)) as raised:
            execution.finish()
        assert raised.value is error
    execution.close()


def test_an_empty_result_is_a_result() -> None:
    runner = GatedRunner()
    runner.gate.set()
    execution = InlineExecution(runner, is_eager=True)
    execution.start(step())
    assert np.array_equal(execution.finish().token_ids, [])
    assert len(runner.threads) == 1


def test_a_thread_that_was_given_up_ends_its_step_with_the_reason_and_starts_no_other() -> None:
    runner = GatedRunner()
    execution = ThreadedExecution(runner)
    execution.start(one_token(1))
    execution.fail(RuntimeError("it hangs"))
    with pytest.raises(RuntimeError, match="it hangs"):
        execution.finish()
    with pytest.raises(RuntimeError, match="it hangs"):
        execution.start(one_token(2))
    runner.gate.set()
    execution.close()
    (thread,) = runner.threads
    assert not thread.is_alive()
