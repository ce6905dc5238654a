"""What becomes of a request whose connection breaks before it was answered.

Noted after the fact and in the background: nobody waits for it, and a note that PostgreSQL does
not take is lost. Then a repetition computes anew, and both are billed.
"""

import logging
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.admission.broken import note_broken, note_heard

_log = logging.getLogger("headrace.gateway")


@dataclass(frozen=True, slots=True)
class Breakage:
    """Notes of one request. `body_hash` is what its caller will repeat, if it repeats at all."""

    database: AsyncEngine
    request_id: str
    key_id: str
    body_hash: bytes | None = None

    async def note(self, *, was_heard: bool) -> None:
        """The connection broke; `was_heard` says whether some of the answer was written."""
        try:
            async with self.database.begin() as connection:
                await note_broken(
                    connection, self.request_id, self.key_id, self.body_hash, was_heard=was_heard
                )
        except (SQLAlchemyError, OSError):
            _log.warning("it could not be noted that request %s broke", self.request_id)

    async def note_heard(self) -> None:
        """Somebody is told the answer after all."""
        try:
            async with self.database.begin() as connection:
                await note_heard(connection, self.request_id)
        except (SQLAlchemyError, OSError):
            _log.warning("it could not be noted that request %s was heard", self.request_id)
