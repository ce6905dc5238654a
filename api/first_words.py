"""How long readers waited for their first words.

A stream's record is in the database before its end is told, so what is noted at the end finds it.
"""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.periodic_notes import PeriodicNotes
from control.metering.first_words import note_first_words

PERIOD_S = 1.0


class FirstWords(PeriodicNotes[float]):
    """Seconds by request."""

    def __init__(self, database: AsyncEngine) -> None:
        super().__init__(database, PERIOD_S)

    def note(self, request_id: str, told_s: float) -> None:
        """A reader was told the first words so long after its request's first byte."""
        self._keep(request_id, told_s)

    async def _store(self, connection: AsyncConnection, noted: Mapping[str, float]) -> None:
        await note_first_words(connection, noted)
