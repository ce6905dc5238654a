"""One clock for all processes: Redis's time, carried by each process's monotonic clock.

Arrivals, deadlines and leases are compared across machines, so they are read here and never
from a host's wall clock, which may jump.
"""

import time
from collections.abc import Callable

import redis
import redis.asyncio


class SharedClock:
    """Seconds UTC as Redis tells them. `synchronize` once before `now`, and now and then after."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset: float | None = None

    def now(self) -> float:
        """Seconds since 1970, UTC, on the shared clock."""
        assert self._offset is not None, "synchronize() comes first"
        return self._monotonic() + self._offset

    def synchronize(self, client: redis.Redis) -> None:
        """Read Redis's time once."""
        before = self._monotonic()
        self._set(client.time(), before)

    async def synchronize_async(self, client: redis.asyncio.Redis) -> None:
        """Read Redis's time once, asynchronously."""
        before = self._monotonic()
        self._set(await client.time(), before)

    def _set(self, reply: tuple[int, int], before: float) -> None:
        seconds, microseconds = reply
        middle = (before + self._monotonic()) / 2
        self._offset = int(seconds) + int(microseconds) / 1e6 - middle
