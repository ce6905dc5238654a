"""Named places at which a test build can be made to die, to prove that nothing is lost there.

`fault_point(name)` stands in the code where the next line matters: between two stores, between a
commit and its announcement. It does nothing unless its process was armed for that place. A process
is armed once, when it starts, and dies once, as by `kill -9`.
"""

import os
import signal
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """A place in one of the service's processes, and what has been done when it is reached."""

    process: str
    meaning: str


FAULT_POINTS = {
    "admission.before_hold": FaultPoint("gateway", "a request is read; no row, no queue entry"),
    "admission.after_hold": FaultPoint("gateway", "the row is held; the request is not queued"),
    "admission.after_enqueue": FaultPoint("gateway", "the request is queued; nobody reads it"),
    "dispatch.before_assign": FaultPoint("dispatcher", "a replica is chosen and not told"),
    "dispatch.after_assign": FaultPoint("dispatcher", "a replica is told; nobody remembers it"),
    "end.after_seize": FaultPoint("dispatcher", "a request is taken from all others, to be ended"),
    "end.after_commit": FaultPoint("dispatcher", "the ending is in the ledger; nobody was told"),
    "sweep.before_requeue": FaultPoint("dispatcher", "a replica is seen to be dead; no more yet"),
    "inbox.before_begin": FaultPoint("replica", "an order is read and not yet taken up"),
    "inbox.after_fence": FaultPoint("replica", "a later attempt is claimed in the ledger"),
    "publish.before_step": FaultPoint("replica", "a step was computed; nobody has its tokens"),
    "publish.after_step": FaultPoint("replica", "a step's tokens are in the log and the feeds"),
    "settle.before_commit": FaultPoint("replica", "all tokens are out; nothing is settled"),
    "settle.after_commit": FaultPoint("replica", "the settlement is in; the ending is not said"),
    "settle.after_ending": FaultPoint("replica", "the ending is said"),
    "expire.before_commit": FaultPoint("maintenance", "lost reservations are closed, uncommitted"),
}


class UnknownFault(ValueError):
    """The words name no fault point; says how they should."""


@dataclass(slots=True)
class _Trap:
    """What this process is armed with: at most one point, and how many hits are left."""

    name: str = ""
    num_left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


# The one state that is a process's own: what it does at its death is no argument of anything.
_trap = _Trap()


def arm(words: str, *, is_test_build: bool) -> None:
    """Die at a point: `NAME`, or `NAME:N` for the N-th time it is reached. Empty: at none.

    Raises UnknownFault if there is no such point, or if this is no test build.
    """
    if not words:
        return
    if not is_test_build:
        raise UnknownFault("HEADRACE_FAULT is for test builds: set HEADRACE_TEST_BUILD=1 as well.")
    name, _, count = words.partition(":")
    if name not in FAULT_POINTS:
        raise UnknownFault(f"HEADRACE_FAULT: no such point; there are {', '.join(FAULT_POINTS)}.")
    if count and not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise UnknownFault("HEADRACE_FAULT: write NAME or NAME:N, where N is 1 or more.")
    _trap.name, _trap.num_left = name, int(count or 1)


def fault_point(name: str) -> None:
    """Die here if this process was armed for it."""
    if _trap.name != name:
        return
    with _trap.lock:
        _trap.num_left -= 1
        if _trap.num_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
