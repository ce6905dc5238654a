"""How the child processes of a batch worker learn that it drains, or that it is gone.

Only the main process can write to the pipe, and it never does: when it drains it closes its end,
when it dies the kernel does. Either way the children read the end of the pipe at once.
"""

import asyncio
import os


class DrainPipe:
    """Make it before the children are forked."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._has_write_end = True
        self.is_announced = False

    def announce(self) -> None:
        """Tell every child. Called by the main process, once or more."""
        self.is_announced = True
        self._close_write_end()

    def enter_child(self) -> None:
        """Give up the child's copy of the writing end, so that only the main process has one."""
        self._close_write_end()

    def watch(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """Set `stop` when the worker drains, for as long as the loop runs."""

        def on_end() -> None:
            loop.remove_reader(self._read_end)
            stop.set()

        loop.add_reader(self._read_end, on_end)

    def _close_write_end(self) -> None:
        if self._has_write_end:
            self._has_write_end = False
            os.close(self._write_end)
