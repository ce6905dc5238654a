"""Says once that the engine has stalled, and once that it moves again.

The watchdog's verdict stands for as long as the stall does, and is asked for several times a
second; a log that repeated it would bury what led to it.
"""

import logging
from collections.abc import Callable

from engine.step_watchdog import Verdict

log = logging.getLogger(__name__)


class StallWatch:
    """Asks for the verdict and remembers the last one."""

    def __init__(self, verdict: Callable[[], Verdict | None]) -> None:
        self._verdict = verdict
        self._stall: Verdict | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether a stall stood when `look` was last called."""
        return self._stall is not None

    def look(self) -> None:
        """Ask now, and log what has changed. One stall that turns into another goes on."""
        verdict = self._verdict()
        if verdict is not None and self._stall is None:
            log.error("the engine has stalled (%s): %s", verdict.kind, verdict.message)
        elif verdict is None and self._stall is not None:
            log.error("the engine moves again; its stall (%s) is over", self._stall.kind)
        self._stall = verdict
