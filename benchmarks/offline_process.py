"""Our side of an offline worker: a process that we start, ask in turn, pause and end."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from benchmarks import process_tree
from benchmarks.offline_work import OfflineWork

_TAIL_BYTES = 1_500
_STOP_LIMIT_S = 30.0


class WorkerFailed(RuntimeError):
    """The worker did not start, died, or could not do a work; the message says why."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, and what to add to the environment."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def whole_environment(self) -> dict[str, str]:
        """Ours with what this command adds."""
        return {**os.environ, **self.environment}  # noqa: TID251


class OfflineProcess:
    """A worker that is loaded, and paused except while it is asked.

    `ready_s` is how long it took from its start, a first short answer included.
    """

    def __init__(self, process: "subprocess.Popen[str]", said: IO[bytes]) -> None:
        self._process = process
        self._said = said
        started = time.perf_counter()
        self._read()
        self.ready_s = time.perf_counter() - started
        process_tree.pause(process.pid)

    def tokens_per_second(self, work: OfflineWork) -> float:
        """Run a work. Raises WorkerFailed."""
        return float(str(self._ask(asdict(work))["tokens_per_s"]))

    def say_after(self, prompt: Sequence[int], output: int) -> list[int]:
        """The greedy tokens that follow a prompt. Raises WorkerFailed."""
        answer = self._ask({"say_after": list(prompt), "output": output})["token_ids"]
        assert isinstance(answer, list)
        return answer

    def peak_memory_mb(self) -> float:
        """The most that it and what it started have held in memory, each."""
        return process_tree.peak_memory_mb(self._process.pid)

    def _ask(self, message: Mapping[str, object]) -> dict[str, object]:
        with process_tree.turn(self._process.pid):
            stdin = self._process.stdin
            assert stdin is not None
            try:
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
            except BrokenPipeError as error:
                raise WorkerFailed(self._last_words()) from error
            return self._read()

    def _read(self) -> dict[str, object]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _TAIL_BYTES))
        return "The worker ended: " + self._said.read().decode(errors="replace").strip()


@contextmanager
def running_worker(command: Command) -> Iterator[OfflineProcess]:
    """Start a worker, wait until it is loaded, and end it afterwards. Raises WorkerFailed."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("a+b") as said:
        process = subprocess.Popen(  # noqa: S603 - a command of this benchmark
            command.argv,
            env=command.whole_environment(),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        try:
            yield OfflineProcess(process, said)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """Let it leave by itself once its input ends, and insist after a while."""
    process_tree.resume(process.pid)
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    # What it did not end itself goes with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
