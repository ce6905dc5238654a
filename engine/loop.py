"""Runs an engine on a thread of its own, between two bounded queues.

    try_submit, try_cancel  ->  commands  ->  [ engine thread ]  ->  updates  ->  publisher

The thread waits for nothing else: for commands when there is no work, for the step in flight,
for room among the updates when the publisher is slow. While a step computes it decides the
next one and hands out the last. If it dies, `failure` says why and the updates end.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import Engine
from engine.engine_stats import EngineStats
from engine.interface.generation_request import MAX_SEQUENCES, GenerationRequest
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.scheduling.sequence import Sequence
from engine.step_watchdog import Verdict

# How often a thread that waits for room looks whether it was told to stop.
_POLL_S = 0.05
# An engine that has been idle for this long goes through its books once.
CHECK_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    choice: int | None
    is_complete: bool


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True)
class _Refuse:
    request: GenerationRequest
    message: str


_Command = _Submit | _Cancel | _Refuse | None


class EngineLoop:
    """The engine's thread. Only it touches the engine after `start`, and it closes it.

    `is_overlapped` False makes it compute one step after another, with equal output.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_commands: int = 1024,
        max_updates: int = 64,
        is_overlapped: bool = True,
    ) -> None:
        self._engine = engine
        self._step = engine.step_overlapped if is_overlapped else engine.step
        self._commands: queue.Queue[_Command] = queue.Queue(max_commands)
        self._is_stopping = threading.Event()
        self.updates = UpdateQueue(max_updates, self._is_stopping.is_set)
        self._stats = engine.stats()
        self._failure: BaseException | None = None
        self._num_repeated_submits = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread against its will, or None."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_repeated_submits(self) -> int:
        """Requests dropped because one with their id was running."""
        return self._num_repeated_submits

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Leave after the step in progress; True when the thread is gone.

        Nothing is ended: whoever wants endings cancels first and reads the updates.
        """
        self._is_stopping.set()
        # A thread that has commands to read is not asleep and needs no waking.
        with contextlib.suppress(queue.Full):
            self._commands.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def try_submit(self, request: GenerationRequest) -> bool:
        """Hand over a request; False when the command queue is full. Any thread may call it.

        It is checked and its blocks are named here, so that the engine's thread need not. One
        that the engine refuses gets one ERROR update per choice; if another of its id is running,
        whose end that would be, it is dropped and counted instead.
        """
        try:
            command: _Command = _Submit(request, self._engine.prepare(request))
        except Exception as error:  # noqa: BLE001 - a request that cannot be served fails alone
            command = _Refuse(request, str(error))
        return self._try_put(command)

    def try_cancel(
        self, request_id: str, choice: int | None = None, *, is_complete: bool = False
    ) -> bool:
        """Ask that a choice, or all, stop before the next step; False when the queue is full.

        `is_complete`: see `Engine.cancel`.
        """
        return self._try_put(_Cancel(request_id, choice, is_complete))

    def stats(self) -> EngineStats:
        """The picture after the latest step. Any thread may call it."""
        return self._stats

    def verdict(self) -> Verdict | None:
        """What is wrong with the engine's progress, if anything. Any thread may call it."""
        return self._engine.verdict()

    def expected_tokens(self, request: GenerationRequest) -> int:
        """KV slots a request is expected to come to, over all choices. Any thread may call it."""
        return self._engine.expected_tokens(request)

    def expected_output(self, cache_scope: str) -> int:
        """Tokens that an output without a limit is expected to come to. Any thread may call it."""
        return self._engine.expected_output(cache_scope)

    def _try_put(self, command: _Command) -> bool:
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - kept in `failure`, for the supervisor
            self._failure = error
        finally:
            self.updates.close()
            self._engine.close()

    def _turn(self) -> None:
        refusals = self._take_commands()
        # Behind the step's updates: one of them may be the end of an earlier request of that id.
        updates = self._step() + refusals
        self._stats = self._engine.stats()
        if updates:
            self.updates.put(updates)

    def _take_commands(self) -> list[SequenceUpdate]:
        """Obey all commands that are there; sleep for one when there is nothing else to do."""
        refusals: list[SequenceUpdate] = []
        if not self._engine.has_work:
            refusals += self._obey(self._wait_for_command())
        # Bounded, so that a flood of commands cannot keep the running sequences waiting.
        for _ in range(self._commands.qsize()):
            refusals += self._obey(self._commands.get_nowait())
        return refusals

    def _wait_for_command(self) -> _Command:
        try:
            return self._commands.get(timeout=CHECK_AFTER_S)
        except queue.Empty:
            self._engine.check()
            return self._commands.get()

    def _obey(self, command: _Command) -> list[SequenceUpdate]:
        if isinstance(command, _Cancel):
            self._engine.cancel(command.request_id, command.choice, is_complete=command.is_complete)
            return []
        if isinstance(command, _Submit):
            return self._add(command)
        return [] if command is None else self._refuse(command.request, command.message)

    def _add(self, submit: _Submit) -> list[SequenceUpdate]:
        try:
            self._engine.add(submit.request, submit.sequences)
        except Exception as error:  # noqa: BLE001 - a request that cannot be added fails alone
            return self._refuse(submit.request, str(error))
        return []

    def _refuse(self, request: GenerationRequest, message: str) -> list[SequenceUpdate]:
        """An ERROR for each choice, unless it would end another request, of the same id."""
        if self._engine.is_here(request.request_id):
            self._num_repeated_submits += 1
            return []
        return [
            SequenceUpdate(request.request_id, choice, (), SequenceEnd.ERROR, message=message)
            for choice in range(min(request.num_choices, MAX_SEQUENCES))
        ]


class UpdateQueue:
    """Updates of the latest steps, one list per step, for one reader.

    It is bounded, except that its end always fits: a reader never waits for a dead engine.
    """

    def __init__(self, max_updates: int, is_abandoned: Callable[[], bool]) -> None:
        self._lists: queue.SimpleQueue[list[SequenceUpdate] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(max_updates)
        self._is_abandoned = is_abandoned

    def put(self, updates: list[SequenceUpdate]) -> None:
        """Append a step's updates, waiting for room until told to stop."""
        while not self._room.acquire(timeout=_POLL_S):
            if self._is_abandoned():
                return
        self._lists.put(updates)

    def close(self) -> None:
        """Let the reader see the end after all that was put."""
        self._lists.put(None)

    def get(self, timeout_s: float | None = None) -> list[SequenceUpdate] | None:
        """The next step's updates, or None at the end, again and again.

        Raises queue.Empty when nothing comes within `timeout_s` seconds.
        """
        updates = self._lists.get(timeout=timeout_s)
        if updates is None:
            self._lists.put(None)
        else:
            self._room.release()
        return updates
