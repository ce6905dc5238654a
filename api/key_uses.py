"""When keys were last used. The time is that of the writing, so it is late by up to a period."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.periodic_notes import PeriodicNotes
from control.identity.keys import note_uses

PERIOD_S = 15.0


class KeyUses(PeriodicNotes[None]):
    """The ids of keys that are used."""

    def __init__(self, database: AsyncEngine) -> None:
        super().__init__(database, PERIOD_S)

    def note(self, key_id: str) -> None:
        """The key was used now."""
        self._keep(key_id, None)

    async def _store(self, connection: AsyncConnection, noted: Mapping[str, None]) -> None:
        await note_uses(connection, sorted(noted))
