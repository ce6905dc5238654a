"""One tenant's crowd does not keep another one waiting, and the clock says what each has used."""

import asyncio

import pytest

from control.fairness.virtual_time import Rates
from control.streams.keys import ModelKeys
from tests.workers.service import Caller, Service, until

CROWD = 8
# Room for two of the crowd's requests at a time.
KV_TOKENS = 512
LONG = b"x" * 40


async def ask(caller: Caller, prompt: bytes, ended: list[str]) -> float:
    """Ask; note at the end whose request it was. Returns the service that it came to."""
    answer = await caller.ask(caller.service.request(prompt, max_tokens=200))
    ended.append(caller.tenant_id)
    usage = answer.last.usage
    assert usage is not None
    return Rates().charge(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


async def test_one_request_beside_a_crowd_is_served_among_the_first(service: Service) -> None:
    ended: list[str] = []
    other = service.new_tenant()
    async with service.caller() as crowd, service.caller(other) as single:
        asked = [asyncio.create_task(ask(crowd, LONG, ended)) for _ in range(CROWD)]
        await asyncio.to_thread(until, lambda: len(service.open_requests()) == CROWD)
        asked.append(asyncio.create_task(ask(single, b"me too", ended)))
        await asyncio.to_thread(until, lambda: len(service.open_requests()) == CROWD + 1)
        service.start_replica(kv_tokens=KV_TOKENS)
        services = await asyncio.gather(*asked)
    assert ended.index(other) <= 2
    keys = ModelKeys(service.model)
    await asyncio.to_thread(until, lambda: service.client.xlen(keys.endings) == 0)
    clock = {name: float(at) for name, at in service.client.hgetall(keys.clock).items()}
    assert clock[crowd.tenant_id.encode()] == pytest.approx(sum(services[:CROWD]))
