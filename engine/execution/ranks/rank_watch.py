"""Notices within a moment that a follower is gone, or that a step of the ranks hangs.

A thread of its own looks, because whoever computes may be inside a sum that never ends. A dead
follower shows at its channel; one that stands still shows only in the time that a step takes,
measured against the steps before it (`engine/step_watchdog.py`). Nothing can be saved then: sums
have no place for a rank that comes back. So all followers are killed, and whoever asked is told.
"""

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.execution.ranks.follower_process import FollowerProcess, RankLost
from engine.step_watchdog import StepWatchdog

_LOOK_S = 0.1

log = logging.getLogger(__name__)


class RankWatch:
    """Watches the followers of one driver from `start` to `close`, or until one is lost."""

    def __init__(self, followers: Sequence[FollowerProcess]) -> None:
        self._followers = followers
        self._steps = StepWatchdog()
        self._loss: RankLost | None = None
        self._is_lost = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_loss: Callable[[RankLost], None]) -> None:
        """Begin to watch; `on_loss` is called on the watching thread, at most once."""
        self._thread = threading.Thread(
            target=self._run, args=(on_loss,), name="rank-watch", daemon=True
        )
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        self._steps.step_started(time.monotonic())
        try:
            yield
        finally:
            self._steps.step_finished(time.monotonic(), computed=True)

    def loss(self, limit_s: float) -> RankLost | None:
        """What was lost, if anything is within the limit."""
        self._is_lost.wait(limit_s)
        return self._loss

    def close(self) -> None:
        """Stop watching and end the followers."""
        self._is_closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._kill_all()

    def _run(self, on_loss: Callable[[RankLost], None]) -> None:
        by_channel = {follower.channel.fileno(): follower for follower in self._followers}
        poller = select.poll()
        for descriptor in by_channel:
            poller.register(descriptor, select.POLLIN)
        was_overdue = False
        while not self._is_closing.is_set():
            ended = [by_channel[descriptor] for descriptor, _ in poller.poll(1000 * _LOOK_S)]
            reason = ended[0].end_in_words() if ended else None
            overdue = self._overdue_in_words()
            # Twice in a row: a pause of this very process is not the ranks' fault.
            if reason is None and was_overdue:
                reason = overdue
            was_overdue = overdue is not None
            if reason is not None and not self._is_closing.is_set():
                self._lose(RankLost(reason), on_loss)
                return

    def _overdue_in_words(self) -> str | None:
        now = time.monotonic()
        verdict = self._steps.verdict(now)
        if verdict is None:
            return None
        return (
            f"A step of {1 + len(self._followers)} ranks began {now - verdict.since:.1f} s ago and "
            "has not ended, far more than the steps before it took: a rank hangs, or the machine "
            "is far too busy."
        )

    def _lose(self, loss: RankLost, on_loss: Callable[[RankLost], None]) -> None:
        log.error("a rank is lost: %s", loss)
        self._kill_all()
        self._loss = loss
        self._is_lost.set()
        on_loss(loss)

    def _kill_all(self) -> None:
        for follower in self._followers:
            follower.kill()
