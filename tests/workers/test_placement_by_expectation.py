"""A request is given away by what it is expected to say, not by what it might."""

import asyncio
import threading
from dataclasses import replace

from engine.interface.generation_request import PriorityClass
from tests.workers.service import Service, until

KV_TOKENS = 512
PROMPT = b"twenty bytes and one"


async def test_large_limits_hold_nobody_back_once_it_is_known_how_much_is_said(
    service: Service, step_gate: threading.Event
) -> None:
    snapshot = service.start_replica(kv_tokens=KV_TOKENS).replica.snapshot
    async with service.caller() as caller:
        assert snapshot().expected_outputs == {}
        for _ in range(12):
            await caller.ask(service.request(PROMPT, max_tokens=256))
        ((scope, expected),) = snapshot().expected_outputs.items()
        assert scope == "scope"
        assert len(PROMPT) <= expected <= 2 * len(PROMPT)
        step_gate.clear()
        # Any two of them might come to more than the whole pool.
        requests = [service.request(PROMPT, max_tokens=256) for _ in range(6)]
        answers = asyncio.gather(*(caller.ask(request) for request in requests))
        await asyncio.to_thread(
            until, lambda: snapshot().num_running + snapshot().num_waiting == len(requests)
        )
        step_gate.set()
        assert [answer.text for answer in await answers] == [PROMPT.decode()] * 6
    assert snapshot().preemptions_total == 0


async def test_a_reader_is_served_at_once_by_a_replica_that_batch_work_fills(
    service: Service, step_gate: threading.Event
) -> None:
    snapshot = service.start_replica(kv_tokens=KV_TOKENS).replica.snapshot

    def num_here() -> int:
        return snapshot().num_running + snapshot().num_waiting

    async with service.caller() as caller:
        step_gate.clear()
        batch = [
            service.request(PROMPT, max_tokens=200, priority_class=PriorityClass.BATCH)
            for _ in range(4)
        ]
        batch_answers = asyncio.gather(*(caller.ask(request) for request in batch))
        # Two fill the pool as far as anybody knows; the others wait outside.
        await asyncio.to_thread(until, lambda: num_here() == 2)
        reader = asyncio.create_task(caller.ask(service.request(PROMPT, max_tokens=200)))
        await asyncio.to_thread(until, lambda: num_here() == 3)
        step_gate.set()
        assert (await reader).text == PROMPT.decode()
        assert [answer.text for answer in await batch_answers] == [PROMPT.decode()] * 4


async def test_a_request_that_fits_no_pool_ends_and_those_behind_it_are_served(
    service: Service,
) -> None:
    service.start_replica(kv_tokens=KV_TOKENS)
    async with service.caller() as caller:
        # As for a version of the same weights with a longer context.
        far_too_long = replace(service.request(PROMPT), prompts=((7,) * KV_TOKENS,))
        hopeless, served = await asyncio.gather(
            caller.ask(far_too_long), caller.ask(service.request(PROMPT))
        )
    assert hopeless.last.error == "internal_error"
    assert service.usage(far_too_long.request_id) == [(0, 0, 0, "failed", "internal_error")]
    assert served.text == PROMPT.decode()
