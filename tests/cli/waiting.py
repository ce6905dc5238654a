"""Waits for a claim to come true, within a deadline, in tests of things that take their time."""

import asyncio
import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.02


async def eventually(is_true: Callable[[], bool], within_s: float = 20.0) -> None:
    """Return once `is_true` says so; fail when the time is up."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(_PAUSE_S)


def eventually_blocking(is_true: Callable[[], bool], within_s: float = 20.0) -> None:
    """The same, for tests without an event loop."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        pause.wait(_PAUSE_S)
