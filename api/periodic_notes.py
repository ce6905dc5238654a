"""What is noted one by one and written for many at once, never while a request waits.

What a gateway that dies has noted and not yet written is lost: nothing may be decided by it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from control.streams.cancellation import is_cancelled

MAX_WAITING = 10_000
LAST_WRITE_S = 2.0

V = TypeVar("V")


class PeriodicNotes(ABC, Generic[V]):
    """Collects values by name, and writes them down once a period."""

    def __init__(self, database: AsyncEngine, period_s: float) -> None:
        self._database = database
        self._period_s = period_s
        self._noted: dict[str, V] = {}

    async def run(self) -> None:
        """Write in periods until cancelled."""
        while not is_cancelled():
            await asyncio.sleep(self._period_s)
            await self.write()

    async def write(self) -> None:
        """Write what was noted; while the database is away it stays noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        try:
            async with asyncio.timeout(LAST_WRITE_S), self._database.begin() as connection:
                await self._store(connection, noted)
        except (SQLAlchemyError, OSError):
            self._noted = {**noted, **self._noted}

    def _keep(self, name: str, value: V) -> None:
        """Note a value, unless far too many wait."""
        if len(self._noted) < MAX_WAITING:
            self._noted[name] = value

    @abstractmethod
    async def _store(self, connection: AsyncConnection, noted: Mapping[str, V]) -> None:
        """Write these in one statement."""
