"""Computes one step while the engine does something else.

    start(step N) -> decide step N + 1, publish step N - 1 -> finish() -> start(step N + 1) ...

At most one step is in flight, and whoever starts it finishes it. A runner's exception comes
out of `finish`, whichever thread it was raised in.
"""

import contextlib
import queue
import threading
from typing import Protocol

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.runner import Runner
from engine.scheduling.scheduler_output import SchedulerOutput

# For a thread that is over, or was given up, to end in good order.
_LAST_WORDS_S = 1.0


class Execution(Protocol):
    """Runs steps one after another, beside the caller."""

    def start(self, work: SchedulerOutput) -> None:
        """Begin a step and return at once; the one before must have been finished."""

    def finish(self) -> ModelRunnerOutput:
        """Wait for the step in flight; raises what the runner raised."""

    def close(self) -> None:
        """End it, after the step in flight if there is one. Nothing can be started afterwards."""


class InlineExecution:
    """Computes in the caller's own thread, for tests that choose the order of events.

    A step runs as late as possible, inside `finish`, or as early as possible, inside `start`.
    """

    def __init__(self, runner: Runner, *, is_eager: bool = False) -> None:
        self._runner = runner
        self._is_eager = is_eager
        self._work: SchedulerOutput | None = None
        self._outcome: ModelRunnerOutput | BaseException | None = None

    def start(self, work: SchedulerOutput) -> None:
        """Keep the step, and compute it now if this is eager."""
        assert self._work is None, "a step was started before the one in flight was finished"
        self._work = work
        if self._is_eager:
            self._outcome = _outcome(self._runner, work)

    def finish(self) -> ModelRunnerOutput:
        """Compute the step if that is still to do; raises what the runner raised."""
        assert self._work is not None, "no step is in flight"
        outcome = self._outcome or _outcome(self._runner, self._work)
        self._work = self._outcome = None
        return _result(outcome)

    def close(self) -> None:
        """Forget the step in flight."""
        self._work = self._outcome = None


class ThreadedExecution:
    """Computes on a thread of its own, named "execution"; only it touches the runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_in_flight = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._work: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[ModelRunnerOutput | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="execution", daemon=True)
        self._thread.start()

    def start(self, work: SchedulerOutput) -> None:
        """Hand the step to the thread; raises what `fail` was given."""
        if self._failure is not None:
            raise self._failure
        assert not self._is_closed, "a step was started after the end"
        assert not self._is_in_flight, "a step was started before the one in flight was finished"
        self._is_in_flight = True
        self._work.put(work)

    def finish(self) -> ModelRunnerOutput:
        """Wait for the thread; raises what the runner raised. The thread outlives that."""
        assert self._is_in_flight, "no step is in flight"
        outcome = self._outcomes.get()
        self._is_in_flight = False
        return _result(outcome)

    def fail(self, error: BaseException) -> None:
        """Give up the thread: the step in flight, which may never end, ends with this error.

        Nothing can be started afterwards. Any thread may call it.
        """
        self._failure = error
        self._outcomes.put(error)
        self._is_over.set()

    def close(self) -> None:
        """Wait for the step in flight, whose result is dropped, and let the thread end.

        A thread that was given up is left to itself if it does not end soon.
        """
        if not self._is_closed:
            self._is_closed = True
            self._work.put(None)
        self._is_over.wait()
        self._thread.join(_LAST_WORDS_S)
        with contextlib.suppress(queue.Empty):
            self._outcomes.get_nowait()
        self._is_in_flight = False

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._outcomes.put(_outcome(self._runner, work))
        self._is_over.set()


def _outcome(runner: Runner, work: SchedulerOutput) -> ModelRunnerOutput | BaseException:
    try:
        return runner.execute(work)
    except BaseException as error:  # noqa: BLE001 - raised again by `finish`
        return error


def _result(outcome: ModelRunnerOutput | BaseException) -> ModelRunnerOutput:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
