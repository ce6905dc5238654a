"""The parts a gateway is made of, and their common life.

A gateway holds nothing that matters: it may be killed at any time. Routes reach their parts
through `gateway_of`, so a test can build a gateway of its own.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import redis.asyncio
from fastapi import Request
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from api.authentication import Authenticator
from api.drain import Drain
from api.first_words import FirstWords
from api.grammars import Grammars
from api.key_uses import KeyUses
from api.prompts import Prompts
from api.readiness import Readiness
from api.registry_view import RegistryView
from api.settings import GatewaySettings
from control.admission.admission import Admission
from control.batches.doorbell import Doorbell
from control.database.connection import connect_async as connect_database
from control.files.store import FileStore, LocalFileStore
from control.identity.request_id import NUM_RANDOM_BITS, mint_request_id
from control.streams.cancellation import is_cancelled
from control.streams.clock import SharedClock
from control.streams.connection import connect_async as connect_redis
from control.streams.follower import Follower
from engine.interface.sampling_params import MAX_SEED

CLOCK_PERIOD_S = 60.0
LAST_WORK_S = 5.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """Everything a route may need."""

    database: AsyncEngine
    redis: redis.asyncio.Redis
    clock: SharedClock
    authenticator: Authenticator
    key_uses: KeyUses
    first_words: FirstWords
    pepper: bytes = field(repr=False)
    registry: RegistryView
    prompts: Prompts
    grammars: Grammars
    follower: Follower
    admission: Admission
    readiness: Readiness
    drain: Drain
    max_body_bytes: int
    heartbeat_s: float
    files: FileStore
    doorbell: Doorbell | None
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def mint_request_id(self) -> str:
        """A new id, of the present second."""
        return mint_request_id(self.clock.now(), secrets.randbits(NUM_RANDOM_BITS))

    def mint_seed(self) -> int:
        """The seed of a request that named none."""
        return secrets.randbits(63) & MAX_SEED

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Let work go on after its request is over; it is waited for at the end."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect, keep connected, and close. Raises if a store is away at the start."""
        await self.clock.synchronize_async(self.redis)
        await self.follower.announce()
        await asyncio.to_thread(self.prompts.start)
        tasks = [
            asyncio.create_task(self.follower.run(), name="follower"),
            asyncio.create_task(self._keep_time(), name="clock"),
            asyncio.create_task(self._preload(), name="preload"),
            asyncio.create_task(self.key_uses.run(), name="key uses"),
            asyncio.create_task(self.first_words.run(), name="first words"),
        ]
        try:
            yield
        finally:
            if self._background:
                await asyncio.wait(self._background, timeout=LAST_WORK_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.key_uses.write()
            await self.first_words.write()
            await asyncio.to_thread(self.prompts.close)
            await asyncio.to_thread(self.grammars.close)
            if self.doorbell is not None:
                await asyncio.to_thread(self.doorbell.close)
            await self.database.dispose()
            await self.redis.aclose()

    async def _keep_time(self) -> None:
        while not is_cancelled():
            await asyncio.sleep(CLOCK_PERIOD_S)
            try:
                await self.clock.synchronize_async(self.redis)
            except (RedisError, OSError):
                continue  # The monotonic clock carries on alone until Redis is back.

    async def _preload(self) -> None:
        """Load every version in force, so that no request waits for a tokenizer."""
        await self.prompts.preload(await self.registry.current())


def build_gateway(settings: GatewaySettings) -> Gateway:
    """Build the parts; nothing connects before `running`."""
    database = connect_database(
        settings.database_url.get_secret_value(), "gateway", settings.database_pool_size
    )
    client = connect_redis(settings.redis_url.get_secret_value())
    key_uses = KeyUses(database)
    follower = Follower(client, "gateway-" + secrets.token_hex(8))
    registry = RegistryView(database)
    broker = settings.celery_broker_url
    return Gateway(
        database=database,
        redis=client,
        clock=SharedClock(),
        authenticator=Authenticator(database, settings.pepper, uses=key_uses),
        key_uses=key_uses,
        first_words=FirstWords(database),
        pepper=settings.pepper,
        registry=registry,
        prompts=Prompts(),
        grammars=Grammars(),
        follower=follower,
        admission=Admission(database, client, follower.follower_id, settings.max_queued),
        readiness=Readiness(database, client, registry),
        drain=Drain(),
        max_body_bytes=settings.max_body_bytes,
        heartbeat_s=settings.heartbeat_s,
        files=LocalFileStore(settings.data_dir / "files"),
        doorbell=None if broker is None else Doorbell(broker.get_secret_value()),
    )


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves the request."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
