"""Carries one line of a batch from its claim to its result.

A line is looked up before it is run: a request that was accepted by an earlier claim is
followed to its end, one that has ended gives its result, and only one that PostgreSQL does not
know is accepted now. So a line is computed once, whoever was killed in between.
"""

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.admission.admission import Admission
from control.admission.reservation import give_back
from control.batches.endings import BATCH_EXPIRED, Unexecuted
from control.batches.items import Item, ItemResult, renew_request
from control.batches.lifecycle import OpenBatch
from control.batches.stored_request import StoredRequest, read_stored
from control.errors import GenerationFailed, ServiceError
from control.identity.request_id import NUM_RANDOM_BITS, created_at_of, mint_request_id
from control.protocol.accepted_request import Order
from control.protocol.error_object import ending_of, face_of
from control.protocol.responses import CHAT, COMPLETION, ReplyHead, to_json, whole_reply
from control.registry.model_version import ModelVersion
from control.streams.clock import SharedClock
from control.streams.follower import Follower, FollowerLag, Subscription
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import PriorityClass
from engine.interface.sampling_params import MAX_SEED
from workers.batch_requests import CHAT_ENDPOINT, LineRequests

MAX_RERUNS = 5
LOOK_AGAIN_S = 1.0
# Accepting is a statement and a call of Redis: milliseconds, unless a store is away.
ACCEPT_LIMIT_S = 2.0
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 8.0

# Ends that say nothing about the request itself: it may run again, as another request. A replica
# lost is not among them: the dispatcher tried twice, and the request may be what kills replicas.
RERUN_CODES = frozenset({"cancelled", "request_lost", "server_is_overloaded", "server_restarting"})

log = logging.getLogger(__name__)

ItemTask = asyncio.Task[tuple[Item, ItemResult | None]]


class ItemLost(Exception):
    """The item's lease went to somebody else, who will write its result."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the items of every batch need."""

    database: AsyncEngine
    follower: Follower
    admission: Admission
    requests: LineRequests
    clock: SharedClock

    def mint_request_id(self) -> str:
        """A new id, of the present second."""
        return mint_request_id(self.clock.now(), secrets.randbits(NUM_RANDOM_BITS))


class ItemCarrier:
    """Carries the items of one batch, all on one model version.

    Set `stop_reason` when nothing may be started any more: what runs is then followed to its
    end, and what does not run ends with the reason.
    """

    def __init__(self, means: Means, batch: OpenBatch, version: ModelVersion) -> None:
        self.stop_reason: Unexecuted | None = None
        self._means = means
        self._batch = batch
        self._version = version
        self._accepting: set[asyncio.Task[bool]] = set()

    async def carry(self, item: Item) -> tuple[Item, ItemResult]:
        """The item, perhaps under a newer request id, and how its line ended. Raises ItemLost."""
        pause_s, num_renewed = 0.0, 0
        while True:
            outcome = await self._look(item)
            if isinstance(outcome, ItemResult):
                return item, outcome
            if outcome.is_to_be_renewed:
                num_renewed += 1
                if num_renewed > MAX_RERUNS:
                    return item, _refusal(ending_of("request_lost"))
                item = await self._renewed(item)
            await asyncio.sleep(max(pause_s, outcome.wait_s))
            pause_s = min(2 * pause_s or FIRST_WAIT_S, MAX_WAIT_S)

    def mint_request_id(self) -> str:
        """An id for a line that has none yet."""
        return self._means.mint_request_id()

    async def cancel(self, item: Item) -> None:
        """Ask that the item's request stop, should it run."""
        await self._means.follower.cancel(self._version.model, item.request_id)

    async def finish_accepting(self) -> None:
        """Wait until no request is half accepted; the items that asked may be gone.

        One that takes too long is found half accepted by whoever claims its line next.
        """
        if self._accepting:
            await asyncio.wait(self._accepting, timeout=ACCEPT_LIMIT_S)

    async def _look(self, item: Item) -> "ItemResult | _LookAgain":
        """Find out where the item's request is, and follow it to its end if it has one yet."""
        async with self._means.follower.subscribe(
            self._version.model, item.request_id
        ) as subscription:
            stored = await self._read(item)
            if stored is not None and not stored.is_held:
                return await self._result(item, stored)
            if stored is not None:
                return await self._follow(item, subscription)
            if self.stop_reason is not None:
                return ItemResult(error=self.stop_reason.as_json())
            try:
                await self._start(item)
            except InvalidRequest as error:
                return _refusal(error)
            except ServiceError as error:
                if error.retry_after_ms is None:
                    return _refusal(error)
                return _LookAgain(wait_s=error.retry_after_ms / 1000)
            await _hear_end(subscription)
            return _LookAgain()

    async def _follow(self, item: Item, subscription: Subscription) -> "_LookAgain":
        """Hear the end of a request that was accepted before, by whomever.

        One that Redis does not know was lost there, or was never queued because its worker died
        in between. Nothing runs that could still be settled but what Redis lost while a replica
        had it; that one finds the row ended, or ends the new row in its place.
        """
        for _ in range(2):
            if await self._means.follower.attach(subscription):
                if self.stop_reason is not None:
                    await self.cancel(item)
                await _hear_end(subscription)
                return _LookAgain()
            await asyncio.sleep(LOOK_AGAIN_S)
        async with self._means.database.begin() as connection:
            await give_back(connection, item.request_id)
        return _LookAgain()

    async def _renewed(self, item: Item) -> Item:
        """The item as another request, because its last one ended through no fault of its own."""
        renewed = replace(item, request_id=self._means.mint_request_id())
        async with self._means.database.begin() as connection:
            if not await renew_request(connection, item, renewed.request_id):
                raise ItemLost(item.custom_id)
        return renewed

    async def _read(self, item: Item) -> StoredRequest | None:
        async with self._means.database.connect() as connection:
            return await read_stored(connection, item.request_id)

    async def _start(self, item: Item) -> None:
        """Accept the request. Once begun it is finished, even if this item is let go."""
        request, reservation = await self._means.requests.build(
            item.body, self._version, self._order(item), created_at_of(item.request_id)
        )
        accepting = asyncio.create_task(self._means.admission.accept(reservation, request))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        await asyncio.shield(accepting)

    def _order(self, item: Item) -> Order:
        return Order(
            request_id=item.request_id,
            tenant_id=self._batch.tenant_id,
            key_id=self._batch.key_id,
            endpoint=self._batch.endpoint,
            priority_class=PriorityClass.BATCH,
            minted_seed=_seed_of(item),
            arrival=self._means.clock.now(),
            deadline_at=self._batch.expires_at.timestamp(),
        )

    async def _result(self, item: Item, stored: StoredRequest) -> "ItemResult | _LookAgain":
        """The line's result, unless it should run again."""
        if stored.error is None:
            return ItemResult(status_code=200, response=await self._reply(item, stored))
        if stored.error == "deadline_exceeded":
            # The request's deadline is the end of the batch's window.
            return ItemResult(error=BATCH_EXPIRED.as_json())
        if stored.error in RERUN_CODES:
            if self.stop_reason is None:
                return _LookAgain(is_to_be_renewed=True)
            return ItemResult(error=self.stop_reason.as_json())
        return _refusal(ending_of(stored.error))

    async def _reply(self, item: Item, stored: StoredRequest) -> bytes:
        """The answer as HTTP gives it. Its prompt is made once more, as of the same second."""
        head = ReplyHead(
            shape=CHAT if self._batch.endpoint == CHAT_ENDPOINT else COMPLETION,
            request_id=item.request_id,
            created=int(created_at_of(item.request_id).timestamp()),
            version=self._version,
        )
        contents = await self._means.requests.contents(
            item.body, self._version, self._order(item), created_at_of(item.request_id)
        )
        work = partial(whole_reply, head, stored.choices, stored.usage, contents=contents)
        return await asyncio.to_thread(work) if contents is not None else work()


@dataclass(frozen=True, slots=True)
class _LookAgain:
    """No result yet. The item is to be looked at again, not before `wait_s`."""

    wait_s: float = 0.0
    is_to_be_renewed: bool = False


async def carry_safely(carrier: ItemCarrier, item: Item) -> tuple[Item, ItemResult | None]:
    """As `carry`; an item that met a store that is away, or lost its lease, has no result now."""
    try:
        return await carrier.carry(item)
    except ItemLost:
        return item, None
    except (SQLAlchemyError, RedisError, OSError) as error:
        log.warning("request %s will be looked at again: %s", item.request_id, type(error).__name__)
        await asyncio.sleep(LOOK_AGAIN_S)
        return item, None
    except Exception:  # One line must not stop its batch, whatever our fault is.
        log.exception("request %s failed", item.request_id)
        return item, _refusal(GenerationFailed(GenerationFailed.__doc__ or ""))


async def _hear_end(subscription: Subscription) -> None:
    """Wait for the request's last delta. What it said is read from where it was stored."""
    with suppress(FollowerLag):  # It was cancelled for that, and the row will say so.
        while True:
            delta = await subscription.next()
            if delta is not None and delta.is_last:
                return


def _seed_of(item: Item) -> int:
    """The seed of a line that names none: its own, and the same if it must run again."""
    digest = sha256(f"{item.batch_id} {item.line}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & MAX_SEED


def _refusal(error: Exception) -> ItemResult:
    """The line's answer as HTTP would have given it."""
    face = face_of(error)
    return ItemResult(status_code=face.status, response=to_json(face.body))
