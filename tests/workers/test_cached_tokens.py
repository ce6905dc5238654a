"""What usage says of the prefix cache: hits of a prompt, each prompt once, never across scopes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.interface.generation_request import GenerationRequest, PriorityClass
from tests.workers.service import Caller, Service

# Two blocks, and a token that must be computed whatever is cached, for the next to be sampled.
PROMPT = b"so many bytes nobody asked before"
HIT = 32


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a dispatcher and one replica."""
    service = Service(database_url, redis_url, tmp_path)
    service.start_dispatcher()
    service.start_replica()
    yield service
    service.close()


async def cached(caller: Caller, request: GenerationRequest) -> int:
    """What the request's ending says, which the ledger must say too."""
    answer = await caller.ask(request)
    assert answer.last.error is None
    assert answer.last.usage is not None
    assert answer.last.usage.prompt_tokens == request.num_prompt_tokens
    num_cached = answer.last.usage.cached_tokens
    assert caller.service.cached_tokens(request.request_id) == num_cached
    return num_cached


async def test_a_fresh_prompt_is_no_hit_and_its_repetition_is(service: Service) -> None:
    async with service.caller() as caller:
        assert await cached(caller, service.request(PROMPT)) == 0
        assert await cached(caller, service.request(PROMPT)) == HIT
        batch = service.request(PROMPT, priority_class=PriorityClass.BATCH)
        assert await cached(caller, batch) == HIT


async def test_choices_that_share_a_fresh_prompt_are_no_hits_of_it(service: Service) -> None:
    async with service.caller() as caller:
        assert await cached(caller, service.request(PROMPT, n=4)) == 0
        assert await cached(caller, service.request(PROMPT, n=4)) == HIT


async def test_each_prompt_of_a_request_has_its_own_hit(service: Service) -> None:
    async with service.caller() as caller:
        await caller.ask(service.request(PROMPT))
        request = service.request(PROMPT, n=2)
        request = replace(request, prompts=(tuple(PROMPT[::-1]), tuple(PROMPT)))
        assert await cached(caller, request) == HIT


async def test_another_scope_never_hits_not_even_beside_the_first(service: Service) -> None:
    async with service.caller() as caller:
        await caller.ask(service.request(PROMPT))
        others = [service.request(PROMPT, cache_scope=f"other {number}") for number in range(8)]
        hits = await asyncio.gather(*(cached(caller, request) for request in others))
    assert hits == [0] * 8


async def test_one_prompt_asked_many_times_at_once_is_computed_once(service: Service) -> None:
    async with service.caller() as caller:
        requests = [service.request(PROMPT) for _ in range(8)]
        hits = await asyncio.gather(*(cached(caller, request) for request in requests))
    assert sorted(hits) == [0] + [HIT] * 7
