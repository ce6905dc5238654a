"""A turn at a batch: at most a few workers carry one batch at once, however often it was rung.

A turn is an advisory lock on a connection of its own, so it ends with its holder. A holder that
was stopped, or cut off, keeps nothing: the server ends a session that says nothing for long.
Turns bound the number of doorbells, not correctness: that is what leases and epochs are for.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

SILENCE_LIMIT_S = 30
RENEW_S = 5


class Turn:
    """A turn that is held; keep it by `renew` at least every few seconds."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def renew(self) -> None:
        """Say that we are alive. Raises what the database raises once the turn is lost."""
        await self._connection.execute(text("SELECT 1"))


@asynccontextmanager
async def try_turn(
    database: AsyncEngine, batch_id: str, max_workers: int
) -> AsyncIterator[Turn | None]:
    """Take one of the batch's turns, or None if all are taken."""
    async with database.connect() as pooled:
        connection = await pooled.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text(f"SET idle_session_timeout = '{SILENCE_LIMIT_S}s'"))
        try:
            is_ours = False
            for place in range(max_workers):
                is_ours = await connection.scalar(
                    text("SELECT pg_try_advisory_lock(hashtext(:batch_id), :place)"),
                    {"batch_id": batch_id, "place": place},
                )
                if is_ours:
                    break
            yield Turn(connection) if is_ours else None
        finally:
            # Closing the session ends the turn and its settings; the pool must not see it again.
            await connection.invalidate()
