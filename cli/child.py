"""One child process: what it is, and one run of it.

A run has a process group of its own, so that a Ctrl-C in the terminal reaches only the
supervisor, and so that whatever the child started can be swept up after it. A child with a
lock holds it (through an inherited file descriptor) for as long as it or anything it started
lives: two runs over the same data can never overlap, whoever was killed in between.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.errors import CommandFailed
from cli.system_user import SystemUser

_LAUNCHER = Path(__file__).with_name("launch.py")
_MAX_LOG_BYTES = 5_000_000
_TAIL_BYTES = 8192
_TAIL_LINES = 15
_POLL_S = 0.05


class ChildDidNotStart(CommandFailed):
    """A child ended, or did not become ready in time, while it was being started."""

    def __init__(self, name: str, reason: str, last_lines: str) -> None:
        log = f"\nIts last words:\n{last_lines}" if last_lines else ""
        super().__init__(f"{name} did not start: {reason}.{log}")


async def always_ready() -> bool:
    """For a child that nobody waits for."""
    return True


def nothing_to_prepare() -> None:
    """For a child that needs nothing before a start."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child is: its command, how it is known to be ready, and how it is ended.

    `is_ready` is asked until it says true, within `start_timeout_s`. `prepare` runs before each
    start, with the lock held. `death_signal` is what the kernel sends it if the supervisor dies.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]] = always_ready
    prepare: Callable[[], None] = nothing_to_prepare
    lock: Path | None = None
    folder: Path | None = None
    user: SystemUser | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    start_timeout_s: float = 60.0
    grace_s: float = 15.0


class ChildRun:
    """One run of a child, from its start to its end."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: "_Log") -> None:
        self._spec = spec
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, spec: ChildSpec, logs: Path) -> "ChildRun":
        """Start the child; its output goes to `<logs>/<name>.log`, kept from growing for ever."""
        log = _Log.begin(logs / f"{spec.name}.log")
        user = "-" if spec.user is None else f"{spec.user.uid}:{spec.user.gid}"
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER)]
        launch += [str(os.getpid()), str(int(spec.death_signal)), user, *spec.argv]
        async with _held(spec) as descriptors:
            spec.prepare()
            output = os.open(log.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                process = await asyncio.create_subprocess_exec(
                    *launch,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=spec.folder,
                    env=dict(spec.environment),
                    start_new_session=True,
                    pass_fds=descriptors,
                )
            finally:
                os.close(output)
        return cls(spec, process, log)

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end and sweep up whatever the child has left; its exit status."""
        status = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        return status

    async def become_ready(self) -> None:
        """Wait until the child is ready. Raises ChildDidNotStart, after ending the child."""
        end = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                while not end.done() and not await self._spec.is_ready():
                    await asyncio.wait([end], timeout=_POLL_S)
        except TimeoutError:
            await self.stop()
            reason = f"it was not ready after {self._spec.start_timeout_s:g} s"
            raise ChildDidNotStart(self._spec.name, reason, self.last_lines()) from None
        finally:
            end.cancel()
        if self._process.returncode is not None:
            reason = f"it ended with {describe_status(await self.wait())}"
            raise ChildDidNotStart(self._spec.name, reason, self.last_lines())

    async def stop(self) -> int:
        """Ask the child to end, insist after its grace, and wait; its exit status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(self._spec.stop_signal)
            try:
                await asyncio.wait_for(self._process.wait(), self._spec.grace_s)
            except TimeoutError:
                self._signal_group(signal.SIGKILL)
        return await self.wait()

    def last_lines(self) -> str:
        """The end of what this run has logged."""
        return self._log.last_lines()

    def _signal_group(self, which: signal.Signals) -> None:
        # PermissionError: some systems say so of a group whose members are all zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, which)


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


@contextlib.asynccontextmanager
async def _held(spec: ChildSpec) -> AsyncIterator[tuple[int, ...]]:
    """Hold the child's lock until the child has inherited it."""
    if spec.lock is None:
        yield ()
        return
    descriptor = os.open(spec.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                while not _try_lock(descriptor):  # noqa: ASYNC110 - its owner is no task of ours
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            reason = f"an earlier run still holds {spec.lock}"
            raise ChildDidNotStart(spec.name, reason, "") from None
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Log:
    """One run's part of a log file: from `start` bytes on."""

    path: Path
    start: int

    @classmethod
    def begin(cls, path: Path) -> "_Log":
        """Go on in the file, or, if it has grown large, in a new one beside its end (`.1`)."""
        size = path.stat().st_size if path.exists() else 0
        if size <= _MAX_LOG_BYTES:
            return cls(path, size)
        with path.open("rb") as log:
            log.seek(size - _MAX_LOG_BYTES)
            path.with_name(path.name + ".1").write_bytes(log.read())
        path.unlink()
        return cls(path, 0)

    def last_lines(self) -> str:
        with self.path.open("rb") as log:
            log.seek(max(self.start, self.path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])
