"""The lines of a batch that one worker carries at once: claimed, kept, ended, given back."""

import asyncio
import time

from sqlalchemy.ext.asyncio import AsyncEngine

from control.batches.batch import BatchStatus
from control.batches.endings import BATCH_CANCELLED, BATCH_EXPIRED, Unexecuted
from control.batches.items import Item, claim_items, end_item, release_items, renew_leases
from control.batches.lifecycle import OpenBatch, expire_unstarted, num_unended, read_open
from workers.batch_item import ItemCarrier, ItemTask, carry_safely
from workers.ending_tasks import end_tasks

LOOK_S = 1.0
RENEW_S = 5.0


class ItemWindow:
    """At most `size` lines in flight. A lease that went to somebody else is let go at once."""

    def __init__(
        self, database: AsyncEngine, carrier: ItemCarrier, batch: OpenBatch, size: int
    ) -> None:
        self._database = database
        self._carrier = carrier
        self._batch = batch
        self._size = size
        self._running: dict[int, tuple[Item, ItemTask]] = {}
        self._looked_at = float("-inf")
        self._is_paused = False
        self._renewed_at = time.monotonic()

    async def work(self, stop: asyncio.Event, ends_at: float) -> bool:
        """Carry lines until all have results (True), or until `stop` or `ends_at` (False), or
        until none runs while the batch is paused (False).

        What still runs then is given back; its requests go on.
        """
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and time.monotonic() < ends_at:
                await self._renew()
                await self._look_at_batch()
                await self._fill()
                if not self._running and await self._has_ended():
                    return True
                if not self._running and self._is_paused:
                    return False
                tasks = {task for _, task in self._running.values()}
                await asyncio.wait(
                    {stopping, *tasks}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                await self._collect()
            return False
        finally:
            stopping.cancel()
            await self._let_go()

    async def _renew(self) -> None:
        """Keep the leases. First of all after a pause: what was lost meanwhile must not go on."""
        if time.monotonic() - self._renewed_at < RENEW_S:
            return
        self._renewed_at = time.monotonic()
        items = [item for item, _ in self._running.values()]
        if items:
            async with self._database.begin() as connection:
                still_ours = await renew_leases(connection, items)
            await self._drop([item for item in items if item.line not in still_ours])

    async def _look_at_batch(self) -> None:
        """See whether the batch was cancelled or its window is over, and if so, stop what runs; or
        whether nothing more of it is to be begun.
        """
        if self._carrier.stop_reason or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        async with self._database.begin() as connection:
            batch = await read_open(connection, self._batch.batch_id)
            self._is_paused = batch is not None and batch.is_paused
            reason = _reason_to_stop(batch)
            if reason is BATCH_EXPIRED:
                await expire_unstarted(connection, self._batch.batch_id)
        if reason is not None:
            self._carrier.stop_reason = reason
            for item, _ in self._running.values():
                await self._carrier.cancel(item)

    async def _fill(self) -> None:
        room = self._size - len(self._running)
        if room <= 0 or self._is_paused:
            return
        fresh_ids = [self._carrier.mint_request_id() for _ in range(room)]
        async with self._database.begin() as connection:
            items = await claim_items(connection, self._batch.batch_id, fresh_ids)
        for item in items:
            carrying = carry_safely(self._carrier, item)
            task = asyncio.create_task(carrying, name=f"request {item.request_id}")
            self._running[item.line] = item, task

    async def _has_ended(self) -> bool:
        async with self._database.connect() as connection:
            return await num_unended(connection, self._batch.batch_id) == 0

    async def _collect(self) -> None:
        """Write the results that are there."""
        for line, (_, task) in list(self._running.items()):
            if not task.done():
                continue
            del self._running[line]
            item, result = task.result()
            async with self._database.begin() as connection:
                if result is None:
                    await release_items(connection, [item])
                else:
                    await end_item(connection, item, result)

    async def _let_go(self) -> None:
        items = [item for item, _ in self._running.values()]
        await self._drop(items)
        await self._carrier.finish_accepting()
        if items:
            async with self._database.begin() as connection:
                await release_items(connection, items)

    async def _drop(self, items: list[Item]) -> None:
        await end_tasks([self._running.pop(item.line)[1] for item in items])


def _reason_to_stop(batch: OpenBatch | None) -> Unexecuted | None:
    if batch is None or batch.status is BatchStatus.CANCELLING:
        return BATCH_CANCELLED
    return BATCH_EXPIRED if batch.is_past_window else None
