"""The Batches API: create, look, list, cancel. The work is done by batch workers.

The row is written first and the doorbell rung after its commit: a doorbell that is lost, or
that nobody hears, is rung again by maintenance.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.body import read_json_body
from api.callers import BatchCaller
from api.gateway import Gateway, gateway_of
from api.repetition import answer_once, claim_of
from api.stored import transaction
from control.admission.idempotency import answered_once
from control.batches.batch import mint_batch_id
from control.batches.batch_request import BatchRequest
from control.batches.store import NewBatch, cancel_batch, create_batch, find_batch, list_batches
from control.identity.request_id import NUM_RANDOM_BITS
from control.protocol.canonical_body import body_hash
from control.protocol.json_body import parse_object
from control.protocol.responses import to_json

router = APIRouter()


@router.post("/v1/batches")
async def create(request: Request, caller: BatchCaller) -> Response:
    """Start a batch on an uploaded file."""
    gateway = gateway_of(request)
    body = parse_object(await read_json_body(request, gateway.max_body_bytes))
    fields = BatchRequest.parse(body)
    claim = claim_of(request, caller.tenant_id, body_hash(body))
    new = NewBatch(
        batch_id=mint_batch_id(gateway.clock.now(), secrets.randbits(NUM_RANDOM_BITS)),
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        endpoint=fields.endpoint,
        completion_window=fields.completion_window,
        input_file_id=fields.input_file_id,
        metadata=fields.metadata or {},
    )
    async with transaction(gateway.database) as connection:

        async def act() -> bytes:
            return to_json((await create_batch(connection, new)).as_object())

        answer, is_replayed = await answered_once(connection, claim, new.batch_id, act)
    if not is_replayed:
        _ring(gateway, new.batch_id)
    return answer_once(answer, is_replayed=is_replayed)


@router.get("/v1/batches")
async def list_all(
    request: Request,
    caller: BatchCaller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> Response:
    """One page of the tenant's batches, newest first."""
    async with transaction(gateway_of(request).database) as connection:
        batches, has_more = await list_batches(connection, caller.tenant_id, limit, after)
    return _json(
        {
            "object": "list",
            "data": [batch.as_object() for batch in batches],
            "first_id": batches[0].batch_id if batches else None,
            "last_id": batches[-1].batch_id if batches else None,
            "has_more": has_more,
        }
    )


@router.get("/v1/batches/{batch_id}")
async def show(request: Request, batch_id: str, caller: BatchCaller) -> Response:
    """A batch, with its counts and usage so far."""
    async with transaction(gateway_of(request).database) as connection:
        batch = await find_batch(connection, caller.tenant_id, batch_id)
    return _json(batch.as_object())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str, caller: BatchCaller) -> Response:
    """Stop a batch; what ended before is kept and given out."""
    gateway = gateway_of(request)
    claim = claim_of(request, caller.tenant_id, body_hash({}))
    async with transaction(gateway.database) as connection:

        async def act() -> bytes:
            batch = await cancel_batch(connection, caller.tenant_id, batch_id)
            return to_json(batch.as_object())

        answer, is_replayed = await answered_once(connection, claim, batch_id, act)
    if not is_replayed:
        _ring(gateway, batch_id)
    return answer_once(answer, is_replayed=is_replayed)


def _ring(gateway: Gateway, batch_id: str) -> None:
    """Ring in the background: the batch is accepted whether a worker hears of it now or not."""
    if gateway.doorbell is not None:
        gateway.start(_ring_off_loop(gateway.doorbell.ring, batch_id))


async def _ring_off_loop(ring: Callable[[str], bool], batch_id: str) -> None:
    await asyncio.to_thread(ring, batch_id)


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
