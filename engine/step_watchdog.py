"""Tells a slow step from a hung one, and a quiet engine from a stuck one.

    waiting(n) -> step_started -> step_finished -> waiting(n) -> ...      verdict: any time

Two things are a stall: a step that does not end, measured against the steps before it, and work
that waits while nothing is computed. Both are over with the next progress. It only watches: it
ends nothing, reads no clock, and one thread feeds it while any other may ask.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

NO_PROGRESS_S = 15.0
LEAST_STEP_LIMIT_S = 1.0
STEP_LIMIT_FACTOR = 3.0
NUM_RECENT_STEPS = 512

# The first steps of a process compile kernels, touch the weights and run the first long prompts:
# until this many have computed something, there is nothing to measure a step against.
NUM_FIRST_STEPS = 8
FIRST_STEP_LIMIT_S = 60.0


class StallKind(StrEnum):
    """What stands still."""

    NO_PROGRESS = "no_progress"
    STEP_OVERDUE = "step_overdue"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A stall that stands. `since` is on the clock that fed the watchdog; `message` is for an
    operator."""

    kind: StallKind
    since: float
    message: str


class _View(NamedTuple):
    """All that a verdict depends on; replaced as a whole, so that a reader sees one instant.

    `step_since` is when the device could begin with the oldest step in flight, `progress_at`
    when something was last computed or began to be wanted. `step_limit_s` is None for the first
    steps.
    """

    step_since: float | None = None
    progress_at: float = 0.0
    num_waiting: int = 0
    step_limit_s: float | None = None


class StepWatchdog:
    """Watches the steps of one engine. Steps may overlap; they end in the order they started."""

    def __init__(self) -> None:
        self._view = _View()
        self._starts: deque[float] = deque()
        self._recent = RecentSteps(NUM_RECENT_STEPS)
        self._stalls_total = 0

    @property
    def stalls_total(self) -> int:
        """Stalls that are over. One that stands is counted when it ends."""
        return self._stalls_total

    def waiting(self, now: float, num_waiting: int) -> None:
        """So many sequences, joined or not, want a step."""
        view = self._view
        if num_waiting == view.num_waiting:
            return
        # Time without work is no time without progress.
        was_idle = view.num_waiting == 0 and view.step_since is None
        progress_at = now if was_idle else view.progress_at
        self._become(now, _View(view.step_since, progress_at, num_waiting, view.step_limit_s))

    def step_started(self, now: float) -> None:
        """A step was handed to the device, behind those in flight."""
        self._starts.append(now)
        view = self._view
        if view.step_since is None:
            progress_at = view.progress_at if view.num_waiting else now
            self._view = _View(now, progress_at, view.num_waiting, view.step_limit_s)

    def step_finished(self, now: float, computed: bool) -> None:
        """The oldest step in flight has ended. `computed`: it had at least one token to compute."""
        view, step_since = self._view, self._view.step_since
        assert step_since is not None, "a step ended that was never started"
        self._starts.popleft()
        progress_at, limit_s = view.progress_at, view.step_limit_s
        if computed:
            progress_at = now
            self._recent.add(now - step_since)
            if len(self._recent) >= NUM_FIRST_STEPS:
                limit_s = max(LEAST_STEP_LIMIT_S, STEP_LIMIT_FACTOR * self._recent.p99_s)
        # The next one could not begin before this one was done.
        next_since = now if self._starts else None
        self._become(now, _View(next_since, progress_at, view.num_waiting, limit_s))

    def verdict(self, now: float) -> Verdict | None:
        """The stall that stands at `now`, or None. Any thread may ask."""
        view = self._view
        kind = _stall(view, now)
        if kind is StallKind.STEP_OVERDUE:
            assert view.step_since is not None
            return Verdict(kind, view.step_since, _overdue_in_words(view, now - view.step_since))
        if kind is StallKind.NO_PROGRESS:
            return Verdict(
                kind, view.progress_at, _no_progress_in_words(view, now - view.progress_at)
            )
        return None

    def _become(self, now: float, view: _View) -> None:
        if _stall(self._view, now) is not None and _stall(view, now) is None:
            self._stalls_total += 1
        self._view = view


class RecentSteps:
    """The durations of the latest steps, and their 99th percentile at any time.

    They are kept sorted: one insertion and one removal in a short list are about a microsecond,
    less than any estimate that would have to be explained.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, duration_s: float) -> None:
        """Take the latest step in, and the oldest out when there are too many."""
        if len(self._by_age) == self._max_steps:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        self._by_age.append(duration_s)
        insort(self._by_size, duration_s)

    @property
    def p99_s(self) -> float:
        """At most one step in a hundred took longer. There must be a step."""
        num = len(self._by_size)
        return self._by_size[num - 1 - num // 100]


def _stall(view: _View, now: float) -> StallKind | None:
    if view.step_since is not None:
        limit_s = view.step_limit_s
        if now - view.step_since > (FIRST_STEP_LIMIT_S if limit_s is None else limit_s):
            return StallKind.STEP_OVERDUE
        # One of the first steps may take longer than an engine may later be silent.
        if limit_s is None:
            return None
    elif view.num_waiting == 0:
        return None
    return StallKind.NO_PROGRESS if now - view.progress_at > NO_PROGRESS_S else None


def _overdue_in_words(view: _View, elapsed_s: float) -> str:
    if view.step_limit_s is None:
        limit = f"{FIRST_STEP_LIMIT_S:.1f} s, as for all first steps of a process"
    else:
        limit = (
            f"{view.step_limit_s:.1f} s, {STEP_LIMIT_FACTOR:g} times the p99 of the latest steps "
            f"and at least {LEAST_STEP_LIMIT_S:g} s"
        )
    return (
        f"A step began {elapsed_s:.1f} s ago and has not ended; its limit is {limit}. The device "
        "hangs or is far too busy (look at its load and its driver's messages), or the updates are "
        "not being read (is Redis reachable?). Restart the replica if this does not end."
    )


def _no_progress_in_words(view: _View, elapsed_s: float) -> str:
    where = (
        "A step is in progress: the device is too slow or computes nothing."
        if view.step_since is not None
        else "No step is in progress: nothing fits the KV cache, or the updates are not being read "
        "(is Redis reachable?)."
    )
    return (
        f"Nothing has been computed for {elapsed_s:.1f} s although {view.num_waiting} sequences "
        f"want a step. {where} Restart the replica if this does not end."
    )
