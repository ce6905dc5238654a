"""How the processes of a batch worker learn that it drains, or that it is gone, and how they end.

Only the main process can write to the pipe, and it never does: when it drains it closes its end,
when it dies the kernel does. Either way the children read the end of the pipe at once.

A process has some seconds then. What it still does when they are over is cut: leases lapse and
rows are the truth, so nothing is lost by it. Nobody else would cut it: once SIGTERM means a soft
stop, children ignore the signal that Celery's pool ends them with, and the pool waits for them
without a limit.
"""

import asyncio
import logging
import os
import threading

# What a child and the main process have beyond the seconds of a drain: time to end by themselves.
CHILD_GRACE_S = 1.0
MAIN_GRACE_S = 15.0

log = logging.getLogger(__name__)


class DrainPipe:
    """Make it before the children are forked. `drain_s` is what a drain may take."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._read_end, self._write_end = os.pipe()
        self._has_write_end = True
        self.is_announced = False

    def announce(self) -> None:
        """Tell every child, and see to it that this process ends. Called by the main process."""
        if not self.is_announced:
            self.is_announced = True
            self._end_process_after(self._drain_s + MAIN_GRACE_S)
        self._close_write_end()

    def enter_child(self) -> None:
        """Give up the child's copy of the writing end, so that only the main process has one.

        From the end of the pipe on the child lives little longer than a drain may take.
        """
        self._close_write_end()
        self._end_process_after(self._drain_s + CHILD_GRACE_S)

    def watch(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """Set `stop` when the worker drains, for as long as the loop runs."""

        def on_end() -> None:
            loop.remove_reader(self._read_end)
            stop.set()

        loop.add_reader(self._read_end, on_end)

    def _end_process_after(self, seconds: float) -> None:
        """End this process so long after the end of the pipe, whatever its other threads do."""

        def cut() -> None:
            os.read(self._read_end, 1)
            threading.Event().wait(seconds)
            log.warning("cut: this process did not end within %.0f s of a drain", seconds)
            os._exit(0)

        threading.Thread(target=cut, name="drain limit", daemon=True).start()

    def _close_write_end(self) -> None:
        if self._has_write_end:
            self._has_write_end = False
            os.close(self._write_end)
