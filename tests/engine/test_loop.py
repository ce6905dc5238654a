import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.execution.model_runner_output import ModelRunnerOutput
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.loop import EngineLoop, UpdateQueue
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.step_watchdog import StallKind
from tests.engine.hash_runner import HashRunner, words_alone
from tests.engine.orders import Transcript, greedy, order, run_to_end

PATIENCE_S = 20.0
ENDLESS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


class GatedRunner(HashRunner):
    """Computes a step only when let through, and can be told to break."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.gate = threading.Semaphore(0)
        self.is_inside = threading.Semaphore(0)
        self.is_open = False
        self.breaks = False

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self.is_inside.release()
        if not self.is_open:
            assert self.gate.acquire(timeout=PATIENCE_S)
        if self.breaks:
            raise MemoryError("no memory for this step")
        return super().execute(work)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def build(
    max_commands: int = 16,
    max_updates: int = 16,
    *,
    is_overlapped: bool = True,
    clock: Clock | None = None,
) -> tuple[EngineLoop, GatedRunner]:
    """A loop whose steps are computed on a thread of their own, when let through."""
    settings = EngineSettings(block_size=4, num_blocks=64, max_num_seqs=4)
    runner = GatedRunner(64, 4)
    clock = clock or Clock()
    execution = ThreadedExecution(runner)
    engine = Engine(runner, settings, execution=execution, clock=clock, monotonic=clock)
    loop = EngineLoop(
        engine, max_commands=max_commands, max_updates=max_updates, is_overlapped=is_overlapped
    )
    return loop, runner


@contextmanager
def running(loop: EngineLoop, runner: GatedRunner) -> Iterator[None]:
    loop.start()
    try:
        yield
    finally:
        runner.is_open = True
        runner.gate.release()
        assert loop.stop(PATIENCE_S)


def read_to_end(loop: EngineLoop, num_ends: int) -> Transcript:
    transcript = Transcript()
    while len(transcript.ends) < num_ends:
        updates = loop.updates.get(PATIENCE_S)
        assert updates is not None, loop.failure
        transcript.note(updates)
    return transcript


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_requests_submitted_from_other_threads_are_answered(is_overlapped: bool) -> None:
    loop, runner = build(is_overlapped=is_overlapped)
    runner.is_open = True
    with running(loop, runner):
        assert loop.try_submit(order("a", (1, 2), greedy(6)))
        assert loop.try_submit(order("b", (3,), greedy(6)))
        transcript = read_to_end(loop, 2)
    assert transcript.token_ids["a", 0] == words_alone((1, 2), 6)
    assert transcript.token_ids["b", 0] == words_alone((3,), 6)


@pytest.mark.parametrize("choice", [None, 0])
def test_a_cancel_reaches_the_engine_within_two_steps(choice: int | None) -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        for _ in range(3):
            assert runner.is_inside.acquire(timeout=PATIENCE_S)
            runner.gate.release()
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        assert loop.try_cancel("a", choice)
        num_steps_before = len(runner.steps)
        runner.is_open = True
        runner.gate.release()
        transcript = read_to_end(loop, 1)
        num_steps_after = len(runner.steps)
    assert transcript.ends["a", 0] is SequenceEnd.CANCELLED
    assert num_steps_after - num_steps_before <= 2


def test_a_refused_request_ends_with_one_error_per_choice() -> None:
    loop, runner = build()
    runner.is_open = True
    with running(loop, runner):
        loop.try_submit(order("bad", (999,), SamplingParams(max_tokens=4, n=3)))
        loop.try_submit(order("good", (1,), greedy(4)))
        transcript = read_to_end(loop, 4)
    assert [transcript.ends["bad", choice] for choice in range(3)] == [SequenceEnd.ERROR] * 3
    assert transcript.token_ids["good", 0] == words_alone((1,), 4)


def test_a_repeated_request_does_not_end_the_one_that_runs() -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), greedy(6)))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        loop.try_submit(order("a", (1, 2), greedy(6)))
        runner.is_open = True
        runner.gate.release()
        transcript = read_to_end(loop, 1)
    assert transcript.ends["a", 0] in (SequenceEnd.LENGTH, SequenceEnd.STOP)
    assert loop.num_repeated_submits == 1


def test_a_repeated_request_that_can_never_run_does_not_end_the_one_that_runs() -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), greedy(6)))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        loop.try_submit(order("a", (999,), greedy(6)))
        runner.is_open = True
        runner.gate.release()
        transcript = read_to_end(loop, 1)
    assert transcript.token_ids["a", 0] == words_alone((1, 2), 6)
    assert transcript.ends["a", 0] in (SequenceEnd.LENGTH, SequenceEnd.STOP)
    assert loop.num_repeated_submits == 1


def test_a_refusal_comes_after_the_end_of_an_earlier_request_of_its_id() -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        loop.try_cancel("a")
        loop.try_submit(order("a", (999,), greedy(6)))
        runner.is_open = True
        runner.gate.release()
        ends: list[SequenceEnd] = []
        while len(ends) < 2:
            updates = loop.updates.get(PATIENCE_S)
            assert updates is not None, loop.failure
            ends += [update.end for update in updates if update.end is not None]
    assert ends == [SequenceEnd.CANCELLED, SequenceEnd.ERROR]


def test_a_full_command_queue_says_so() -> None:
    loop, runner = build(max_commands=2)
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        assert loop.try_cancel("x")
        assert loop.try_cancel("y")
        assert not loop.try_cancel("z")
        assert not loop.try_submit(order("b", (1, 2), ENDLESS))


def test_a_dead_engine_is_visible_and_its_updates_end() -> None:
    before = set(threading.enumerate())
    loop, runner = build()
    runner.breaks = runner.is_open = True
    loop.start()
    loop.try_submit(order("a", (1, 2), ENDLESS))
    assert loop.updates.get(PATIENCE_S) is None
    assert loop.updates.get(PATIENCE_S) is None
    assert isinstance(loop.failure, MemoryError)
    assert loop.stop(PATIENCE_S)
    assert not loop.is_alive
    assert not set(threading.enumerate()) - before, "a dead engine leaves nothing running"


def test_a_stopped_engine_ends_its_updates_even_when_nobody_read_them() -> None:
    loop, runner = build(max_updates=1)
    runner.is_open = True
    loop.start()
    loop.try_submit(order("a", (1, 2), ENDLESS))
    # The second step's updates find no room.
    for _ in range(2):
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
    assert loop.stop(PATIENCE_S)
    assert loop.updates.get(PATIENCE_S) is not None
    assert loop.updates.get(PATIENCE_S) is None
    assert loop.failure is None


def test_an_engine_that_never_worked_stops() -> None:
    loop, runner = build()
    with running(loop, runner):
        assert loop.is_alive
    assert loop.updates.get(PATIENCE_S) is None


def test_stats_are_readable_while_a_step_runs() -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        runner.gate.release()
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        # The first step's words come after its picture.
        assert loop.updates.get(PATIENCE_S)
        stats = loop.stats()
    assert (stats.steps_total, stats.running, stats.kv_blocks_free) == (1, 1, 63)


def test_a_verdict_is_given_while_a_step_hangs() -> None:
    clock = Clock()
    loop, runner = build(clock=clock)
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        assert loop.verdict() is None
        clock.now += 1000.0
        verdict = loop.verdict()
        assert verdict is not None
        assert verdict.kind is StallKind.STEP_OVERDUE


def test_what_is_expected_can_be_asked_from_any_thread() -> None:
    loop, runner = build()
    with running(loop, runner):
        loop.try_submit(order("a", (1, 2), ENDLESS))
        assert runner.is_inside.acquire(timeout=PATIENCE_S)
        assert 2 < loop.expected_tokens(order("b", (1, 2), greedy(5))) <= 7
        assert loop.expected_output("scope") > 0


def test_a_request_that_finds_no_room_to_wait_ends_with_one_error_per_choice() -> None:
    runner = GatedRunner(64, 4)
    runner.is_open = True
    settings = EngineSettings(block_size=4, num_blocks=64, max_num_seqs=4, max_waiting=2)
    loop = EngineLoop(Engine(runner, settings))
    with running(loop, runner):
        loop.try_submit(order("many", (1,), SamplingParams(max_tokens=4, n=3)))
        transcript = read_to_end(loop, 3)
    assert set(transcript.ends.values()) == {SequenceEnd.ERROR}
    assert not any(transcript.token_ids.values())


def test_the_update_queue_holds_no_more_than_it_may() -> None:
    is_told_to_stop = threading.Event()
    updates = UpdateQueue(2, is_told_to_stop.is_set)
    lists = [[SequenceUpdate("a", 0, (i,))] for i in range(3)]
    updates.put(lists[0])
    updates.put(lists[1])
    is_told_to_stop.set()
    updates.put(lists[2])
    assert [updates.get(0), updates.get(0)] == lists[:2]
    with pytest.raises(queue.Empty):
        updates.get(0)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_an_engine_that_has_ended_its_last_sequence_is_never_stalled(is_overlapped: bool) -> None:
    clock = Clock()
    engine = Engine(HashRunner(64, 4), EngineSettings(block_size=4, num_blocks=64), monotonic=clock)
    engine.add(order("a", (1, 2), greedy(3)))
    run_to_end(engine, is_overlapped=is_overlapped)
    clock.now += 1000.0
    assert engine.verdict() is None
    engine.add(order("b", (1, 2), greedy(3)))
    engine.cancel("b")
    clock.now += 1000.0
    assert engine.verdict() is None
