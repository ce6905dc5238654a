"""Every cancellation leaves a record: when it was asked, and how soon the engine had stopped."""

import asyncio
from typing import NamedTuple

from sqlalchemy import text

from control.streams.functions import cancel, invoke
from engine.interface.generation_request import GenerationRequest
from tests.workers.service import Caller, Service, until


class Proof(NamedTuple):
    """A row of the view."""

    delay_s: float
    seen_s: float | None
    num_steps: int | None
    tokens_after: int | None
    blocks_freed: int | None
    is_within_two_steps: bool


def proof_of(service: Service, request_id: str) -> Proof:
    """Of one cancellation; `delay_s` is from asking until its row was written."""
    query = text(
        """
        SELECT extract(epoch FROM r.ended_at - p.asked_at)::float8, p.seen_s, p.num_steps,
               p.tokens_after, p.blocks_freed, p.is_within_two_steps
        FROM cancel_proof p JOIN requests r USING (request_id) WHERE request_id = :request_id
        """
    )
    with service.database.connect() as connection:
        return Proof(*connection.execute(query, {"request_id": request_id}).one())


async def cancel_after(caller: Caller, request: GenerationRequest, num_deltas: int) -> None:
    """Ask, cancel once so many deltas have come, and hear the rest."""
    count = 0
    async for _ in caller.stream(request):
        count += 1
        if count == num_deltas:
            call = cancel(caller.service.keys, request.request_id)
            await asyncio.to_thread(invoke, caller.service.client, call)


async def test_a_cancelled_stream_has_stopped_within_two_steps(service: Service) -> None:
    service.start_replica(delay_ms=5)
    async with service.caller() as caller:
        request = service.request(b"x" * 200, max_tokens=200)
        await cancel_after(caller, request, 5)
    proof = proof_of(service, request.request_id)
    assert proof.num_steps is not None
    assert proof.is_within_two_steps
    assert proof.tokens_after is not None
    assert proof.tokens_after <= 3
    # Of 16 tokens each.
    assert proof.blocks_freed is not None
    assert proof.blocks_freed >= 200 // 16
    assert proof.seen_s is not None
    assert 0 <= proof.seen_s <= 5
    # Redis's clock asked, PostgreSQL's wrote.
    assert -1 < proof.delay_s < 5


async def test_a_request_that_is_cancelled_in_the_queue_was_in_no_engine(service: Service) -> None:
    async with service.caller() as caller:
        request = service.request(b"nobody is there to run it")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: request.request_id in service.open_requests())
        call = cancel(service.keys, request.request_id)
        await asyncio.to_thread(invoke, service.client, call)
        assert (await asking).last.error == "cancelled"
    proof = proof_of(service, request.request_id)
    assert proof.seen_s is not None
    assert 0 <= proof.seen_s <= 5
    assert (proof.num_steps, proof.tokens_after, proof.blocks_freed) == (None, 0, 0)
    assert proof.is_within_two_steps


async def test_a_request_that_ended_well_has_all_its_stages(service: Service) -> None:
    service.start_replica(delay_ms=2)
    async with service.caller() as caller:
        request = service.request(b"says it all")
        await caller.ask(request)
    query = text(
        """
        SELECT first_token_s, accept_s, queue_s, place_s, wait_s, prefill_s, publish_s, decode_s,
               inter_token_p50_s, inter_token_p95_s, inter_token_max_s, num_attempts, tenant_id,
               cached_tokens, finish_reasons, error_code
        FROM request_stages WHERE request_id = :request_id
        """
    )
    with service.database.connect() as connection:
        row = connection.execute(query, {"request_id": request.request_id}).one()
    assert all(seconds >= 0 for seconds in row[:11])
    assert abs(row.first_token_s - sum(row[1:7])) < 1e-9
    assert 0.001 <= row.inter_token_p50_s <= row.inter_token_p95_s <= row.inter_token_max_s
    assert (row.num_attempts, row.cached_tokens) == (1, 0)
    assert (row.finish_reasons, row.error_code) == (["stop"], None)
    assert row.tenant_id == service.tenant.tenant_id
