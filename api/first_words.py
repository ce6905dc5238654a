"""How long readers waited for their first words, written for many at once and never on their way.

A stream's record is in the database before its end is told, so what is noted at the end finds it.
What a gateway that dies has noted and not yet written is lost. Nothing is decided by it.
"""

import asyncio

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.metering.first_words import note_first_words
from control.streams.cancellation import is_cancelled

PERIOD_S = 1.0
MAX_WAITING = 10_000
LAST_WRITE_S = 2.0


class FirstWords:
    """Collects seconds by request, and writes them down once a period."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._told_s: dict[str, float] = {}

    def note(self, request_id: str, told_s: float) -> None:
        """A reader was told the first words so long after its request's first byte."""
        if len(self._told_s) < MAX_WAITING:
            self._told_s[request_id] = told_s

    async def run(self) -> None:
        """Write in periods until cancelled."""
        while not is_cancelled():
            await asyncio.sleep(PERIOD_S)
            await self.write()

    async def write(self) -> None:
        """Write what was noted; while the database is away it stays noted."""
        if not self._told_s:
            return
        told_s, self._told_s = self._told_s, {}
        try:
            async with asyncio.timeout(LAST_WRITE_S), self._database.begin() as connection:
                await note_first_words(connection, told_s)
        except (SQLAlchemyError, OSError):
            self._told_s = {**told_s, **self._told_s}
