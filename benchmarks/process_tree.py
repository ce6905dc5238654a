"""A process with everything it started: what it uses, and making it wait for its turn (Linux)."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """The ids of the process and of its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for process_id in (int(path.name) for path in _PROC.iterdir() if path.name.isdigit()):
        with suppress(OSError):
            children.setdefault(int(_stat(process_id)[1]), []).append(process_id)
    found = [root]
    for process_id in found:
        found += children.get(process_id, [])
    return found


def cpu_seconds_of(process_id: int) -> float:
    """Processor time that a process has used so far. Raises OSError if it is gone."""
    stat = _stat(process_id)
    return (int(stat[11]) + int(stat[12])) / _TICKS_PER_S


def thread_cpu_seconds(native_id: int) -> float:
    """Processor time that a thread of this process has used so far, to the nanosecond."""
    schedstat = (_PROC / "self" / "task" / str(native_id) / "schedstat").read_text()
    return int(schedstat.split()[0]) / 1e9


def peak_memory_mb(root: int) -> float:
    """The largest resident sizes of the tree's living processes, added up.

    What several processes share is counted in each.
    """
    kilobytes = 0
    for process_id in tree(root):
        with suppress(OSError):
            status = (_PROC / str(process_id) / "status").read_text(encoding="utf-8")
            lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
            kilobytes += sum(int(line.split()[1]) for line in lines)
    return kilobytes / 1024


def pause(root: int) -> None:
    """Stop the whole tree where it is: it takes no processor time until its turn comes."""
    _signal(root, signal.SIGSTOP)


def resume(root: int) -> None:
    """Let the tree run on."""
    _signal(root, signal.SIGCONT)


@contextmanager
def turn(root: int) -> Iterator[None]:
    """Let a paused tree run for a while."""
    resume(root)
    try:
        yield
    finally:
        pause(root)


def _signal(root: int, which: signal.Signals) -> None:
    for process_id in tree(root):
        with suppress(ProcessLookupError):
            os.kill(process_id, which)


def _stat(process_id: int) -> list[str]:
    """The fields behind the name, which may hold spaces: state, parent, ..."""
    text = (_PROC / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
