"""What one process of a batch worker keeps from task to task, and what a task does with it.

Made before the fork and filled after it, so every process has its own connections, its own
tokenizers and its own name as a follower. That name stays: a request that is followed again by
the same process is not fed to it twice.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cached_property

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from control.admission.admission import Admission
from control.batches.batch import is_batch_id
from control.batches.doorbell import Doorbell
from control.batches.turn import RENEW_S, Turn, try_turn
from control.database.connection import connect_async as connect_database
from control.files.store import LocalFileStore
from control.streams.clock import SharedClock
from control.streams.connection import connect_async as connect_redis
from control.streams.follower import Follower
from workers.batch_drain import DrainPipe
from workers.batch_item import Means
from workers.batch_job import BatchJob, Slice
from workers.batch_requests import LineRequests
from workers.batch_settings import BatchWorkerSettings
from workers.ending_tasks import end_tasks

# A slice, its last waits and its releases together stay under a minute.
SLICE_S = 45.0

# Requests of a batch outlive the worker that follows them by this much: long enough for another
# spot node to come, so that nothing is computed twice.
FOLLOWER_LEASE_S = 600

# Connections that are not closed by then are left to the kernel.
CLOSE_LIMIT_S = 2.0

log = logging.getLogger(__name__)


class BatchProcess:
    """Carries batches, one at a time, for whoever rings."""

    def __init__(self, settings: BatchWorkerSettings, drain: DrainPipe) -> None:
        self._settings = settings
        self._drain = drain

    def carry(self, batch_id: object) -> None:
        """One task: a slice of the batch, then the doorbell again if there is more to do."""
        if not isinstance(batch_id, str) or not is_batch_id(batch_id):
            log.error("a doorbell names no batch")
            return
        try:
            has_more = asyncio.run(self._carry(batch_id))
        except (SQLAlchemyError, RedisError, OSError) as error:
            # Maintenance rings again for a batch that nobody carries.
            log.warning("%s is put aside: %s", batch_id, type(error).__name__)
            return
        if has_more:
            self._doorbell.ring(batch_id)
        log.info("%s: %s", batch_id, "there is more to do" if has_more else "nothing left to do")

    def close(self) -> None:
        """End what this process started."""
        self._requests.close()
        self._doorbell.close()

    @cached_property
    def _doorbell(self) -> Doorbell:
        return Doorbell(self._settings.celery_broker_url)

    @cached_property
    def _requests(self) -> LineRequests:
        return LineRequests()

    @cached_property
    def _follower_id(self) -> str:
        return "batch-" + secrets.token_hex(8)

    async def _carry(self, batch_id: str) -> bool:
        stop = asyncio.Event()
        self._drain.watch(asyncio.get_running_loop(), stop)
        settings = self._settings
        async with self._means() as means:
            turns = settings.headrace_batch_turns
            async with try_turn(means.database, batch_id, turns) as turn:
                if turn is None:
                    log.info("%s is carried by others", batch_id)
                    return False
                log.info("%s is carried here", batch_id)
                keeping = asyncio.create_task(_keep(turn, stop), name="turn")
                try:
                    store = LocalFileStore(settings.file_folder)
                    job = BatchJob(means, store, batch_id, settings.headrace_batch_window)
                    return await job.run(Slice(time.monotonic() + SLICE_S, stop))
                finally:
                    await end_tasks([keeping])

    @asynccontextmanager
    async def _means(self) -> AsyncIterator[Means]:
        settings = self._settings
        database = connect_database(settings.database_url, "batch-worker")
        client = connect_redis(settings.redis_url)
        follower = Follower(client, self._follower_id, FOLLOWER_LEASE_S)
        clock = SharedClock()
        try:
            await clock.synchronize_async(client)
            await follower.announce()
            following = asyncio.create_task(follower.run(), name="follower")
            admission = Admission(
                database, client, self._follower_id, settings.headrace_batch_max_queued
            )
            try:
                yield Means(database, follower, admission, self._requests, clock)
            finally:
                await end_tasks([following])
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await client.aclose()
                    await database.dispose()


async def _keep(turn: Turn, stop: asyncio.Event) -> None:
    """Renew the turn; without it, stop."""
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await turn.renew()
        except (SQLAlchemyError, OSError) as error:
            log.warning("the turn is lost: %s", type(error).__name__)
            stop.set()
            return
