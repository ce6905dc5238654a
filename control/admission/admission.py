"""Letting a request in: reserve, then queue, so that nothing is queued that nobody is billed for.

The order is the promise. The row comes first: a process that dies between the two leaves a held
reservation that maintenance expires, never a request that runs unseen.
"""

import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from control.admission.reservation import Reservation, give_back, hold
from control.errors import KeyMoved, Overloaded, StoreUnavailable
from control.faults import fault_point
from control.streams.functions import enqueue, invoke_async
from control.streams.keys import ModelKeys
from control.streams.messages import QueueEntry
from engine.interface.generation_request import GenerationRequest

RETRY_AFTER_MS = 1000


class Admission:
    """Accepts requests for one follower, which will be fed their deltas."""

    def __init__(
        self,
        database: AsyncEngine,
        client: redis.asyncio.Redis,
        follower_id: str,
        max_queued: int,
    ) -> None:
        self._database = database
        self._client = client
        self._follower_id = follower_id
        self._max_queued = max_queued

    async def accept(self, reservation: Reservation, request: GenerationRequest) -> bool:
        """Hold the reservation and queue the request, or raise and leave neither.

        Raises Overloaded when the queue is full or nobody serves the model, KeyMoved when its key
        stands for another request, and StoreUnavailable when a store is away. False if a request
        of this id was queued before: it is to be followed.
        """
        fault_point("admission.before_hold")
        try:
            is_held = await self._hold(reservation)
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(
                "The ledger does not answer, so nothing is accepted. Try again shortly.",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error
        if not is_held:
            raise KeyMoved("The key stands for another request.")
        fault_point("admission.after_hold")
        try:
            reply = await self._enqueue(reservation, request)
        except (RedisError, OSError) as error:
            # Whether it was queued is unknown, so the row stays: the request ends or expires.
            raise StoreUnavailable(
                "The queue does not answer. Try again shortly.", retry_after_ms=RETRY_AFTER_MS
            ) from error
        fault_point("admission.after_enqueue")
        refusal = self._refusal(reply, reservation.model)
        if refusal is not None:
            async with self._database.begin() as connection:
                await give_back(connection, reservation.request_id)
            raise Overloaded(refusal, retry_after_ms=RETRY_AFTER_MS)
        return reply == b"queued"

    def _refusal(self, reply: bytes, model: str) -> str | None:
        """What a caller is told of a reply to `enqueue`; None if the request was queued."""
        if reply == b"full":
            return (
                f"{self._max_queued} requests are waiting for {model} already. "
                f"Try again in {RETRY_AFTER_MS} ms."
            )
        if reply == b"unserved":
            return f"No replica serves {model} at the moment. Try again later."
        return None

    async def _hold(self, reservation: Reservation) -> bool:
        """Write the row in one round trip; again if the connection turns out to be a dead one."""
        for is_last_try in (False, True):
            try:
                async with self._database.connect() as connection:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    return await hold(connection, reservation)
            except DBAPIError as error:
                if is_last_try or not error.connection_invalidated:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _enqueue(self, reservation: Reservation, request: GenerationRequest) -> bytes:
        entry = QueueEntry(
            request_id=request.request_id,
            tenant_id=reservation.tenant_id,
            priority_class=request.priority_class,
            weights_digest=reservation.weights_digest,
            num_sequences=request.num_choices,
            max_kv_tokens=request.max_kv_tokens,
            arrival=request.arrival,
            deadline_at=request.deadline_at,
            cache_scope=request.cache_scope,
            max_tokens=request.sampling.max_tokens,
            max_choice_tokens=max(map(len, request.prompts)) + request.sampling.max_tokens,
        )
        keys = ModelKeys(reservation.model)
        reply: bytes = await invoke_async(
            self._client, enqueue(keys, entry, request, self._follower_id, self._max_queued)
        )
        return reply
