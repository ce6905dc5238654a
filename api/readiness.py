"""Whether this gateway can serve: both stores answer, something is registered, a replica lives.

Asked however often, it asks the stores at most once a second.
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from api.registry_view import RegistryView
from control.errors import StoreUnavailable
from control.routing.replica_snapshot import ReplicaSnapshot
from control.streams.keys import ModelKeys

MAX_AGE_S = 1.0
CHECK_LIMIT_S = 2.0

_snapshot_decoder = msgspec.msgpack.Decoder(ReplicaSnapshot)


class Readiness:
    """The last verdict of each check: name to whether it held."""

    def __init__(
        self,
        database: AsyncEngine,
        client: redis.asyncio.Redis,
        registry: RegistryView,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._client = client
        self._registry = registry
        self._monotonic = monotonic
        self._checks: dict[str, bool] = {}
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def checks(self) -> dict[str, bool]:
        """Every check by name, at most a second old."""
        async with self._lock:
            if self._monotonic() - self._checked_at >= MAX_AGE_S:
                database, replica = await asyncio.gather(self._has_database(), self._has_replica())
                self._checks = {"database": database, **replica}
                self._checked_at = self._monotonic()
            return self._checks

    async def _has_database(self) -> bool:
        try:
            async with asyncio.timeout(CHECK_LIMIT_S), self._database.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (SQLAlchemyError, OSError):
            return False
        return True

    async def _has_replica(self) -> dict[str, bool]:
        checks = {"redis": False, "registry": False, "replica": False}
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                await self._client.ping()
                checks["redis"] = True
                registry = await self._registry.current()
                checks["registry"] = bool(registry.by_name)
                for model in registry.models:
                    checks["replica"] = checks["replica"] or await self._is_served(model)
        except (RedisError, OSError, StoreUnavailable):
            pass  # What was not reached stays false.
        return checks

    async def _is_served(self, model: str) -> bool:
        keys = ModelKeys(model)
        members = cast("set[bytes]", await self._client.smembers(keys.replicas))
        names = [keys.replica(member.decode()) for member in members]
        snapshots = cast("list[bytes | None]", await self._client.mget(names) if names else [])
        return any(data and _snapshot_decoder.decode(data).is_accepting for data in snapshots)
