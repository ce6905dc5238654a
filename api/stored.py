"""A transaction for a route: what the database cannot do now is told as that."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from control.errors import StoreUnavailable

RETRY_AFTER_MS = 1000


@asynccontextmanager
async def reading(database: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection for single statements, without a transaction's two round trips around them.

    Raises StoreUnavailable.
    """
    async with _told(), database.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        yield connection


@asynccontextmanager
async def transaction(database: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection whose changes are committed at the end. Raises StoreUnavailable."""
    async with _told(), database.begin() as connection:
        yield connection


@asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except (IntegrityError, ProgrammingError):
        raise  # A fault of ours, which waiting does not mend.
    except (DBAPIError, PoolTimeout, OSError) as error:
        raise StoreUnavailable(
            "The database does not answer. Try again shortly.", retry_after_ms=RETRY_AFTER_MS
        ) from error
