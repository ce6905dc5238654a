"""The registry as a gateway sees it: at most a second old, and the last known one when
PostgreSQL is away.
"""

import asyncio
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.errors import StoreUnavailable
from control.registry.model_version import Registry
from control.registry.store import load_registry_async

MAX_AGE_S = 1.0
PATIENCE_S = 0.5
QUERY_LIMIT_S = 5.0


class RegistryView:
    """Reads the registry when it is asked for, once for however many ask together."""

    def __init__(
        self, database: AsyncEngine, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._monotonic = monotonic
        self._known: Registry | None = None
        self._tried_at = float("-inf")
        self._refresh: asyncio.Task[None] | None = None

    async def current(self) -> Registry:
        """The registry. Raises StoreUnavailable if it was never read."""
        if self._monotonic() - self._tried_at >= MAX_AGE_S and self._refresh is None:
            self._refresh = asyncio.create_task(self._load())
        if self._refresh is not None:
            # A database that hangs costs each request this long, not its own patience.
            await asyncio.wait([self._refresh], timeout=PATIENCE_S)
        if self._known is None:
            raise StoreUnavailable("The model registry does not answer.", retry_after_ms=1000)
        return self._known

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(QUERY_LIMIT_S), self._database.connect() as connection:
                started = self._monotonic()
                self._known = await load_registry_async(connection)
            self._tried_at = started
        except (SQLAlchemyError, OSError):
            self._tried_at = self._monotonic()
        finally:
            self._refresh = None
