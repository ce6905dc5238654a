"""When keys were last used, written for many at once and never while a request waits.

The time is that of the writing, so it is late by up to a period; what a gateway that dies has
noted and not yet written is lost. Nothing is decided by it.
"""

import asyncio

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.identity.keys import note_uses
from control.streams.cancellation import is_cancelled

PERIOD_S = 15.0
MAX_WAITING = 10_000
LAST_WRITE_S = 2.0


class KeyUses:
    """Collects the ids of keys that are used, and writes them down once a period."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._used: set[str] = set()

    def note(self, key_id: str) -> None:
        """The key was used now."""
        if len(self._used) < MAX_WAITING:
            self._used.add(key_id)

    async def run(self) -> None:
        """Write in periods until cancelled."""
        while not is_cancelled():
            await asyncio.sleep(PERIOD_S)
            await self.write()

    async def write(self) -> None:
        """Write what was noted; while the database is away it stays noted."""
        if not self._used:
            return
        used, self._used = self._used, set()
        try:
            async with asyncio.timeout(LAST_WRITE_S), self._database.begin() as connection:
                await note_uses(connection, sorted(used))
        except (SQLAlchemyError, OSError):
            self._used |= used
