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
from api.stored import transaction
from api.unserved import refuse_idempotency_key
from control.batches.batch import Batch, mint_batch_id
from control.batches.batch_request import BatchRequest
from control.batches.store import NewBatch, cancel_batch, create_batch, find_batch, list_batches
from control.identity.request_id import NUM_RANDOM_BITS
from control.protocol.json_body import parse_object
from control.protocol.responses import to_json

router = APIRouter()


@router.post("/v1/batches")
async def create(request: Request, caller: BatchCaller) -> Response:
    """Start a batch on an uploaded file."""
    gateway = gateway_of(request)
    refuse_idempotency_key(request)
    body = await read_json_body(request, gateway.max_body_bytes)
    fields = BatchRequest.parse(parse_object(body))
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
        batch = await create_batch(connection, new)
    _ring(gateway, batch)
    return _json(batch.as_object())


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
    async with transaction(gateway.database) as connection:
        batch = await cancel_batch(connection, caller.tenant_id, batch_id)
    _ring(gateway, batch)
    return _json(batch.as_object())


def _ring(gateway: Gateway, batch: Batch) -> None:
    """Ring in the background: the batch is accepted whether a worker hears of it now or not."""
    if gateway.doorbell is not None:
        gateway.start(_ring_off_loop(gateway.doorbell.ring, batch.batch_id))


async def _ring_off_loop(ring: Callable[[str], bool], batch_id: str) -> None:
    await asyncio.to_thread(ring, batch_id)


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
