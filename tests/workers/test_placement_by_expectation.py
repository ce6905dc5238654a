"""A request is given away by what it is expected to say, not by what it might."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.scripted_runner import ScriptedRunner
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.workers.service import Service, until

KV_TOKENS = 512
PROMPT = b"twenty bytes and one"


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a dispatcher and no replica yet."""
    service = Service(database_url, redis_url, tmp_path)
    service.start_dispatcher()
    yield service
    service.close()


async def test_large_limits_hold_nobody_back_once_it_is_known_how_much_is_said(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, execute = threading.Event(), ScriptedRunner.execute

    def execute_behind_a_gate(runner: ScriptedRunner, work: SchedulerOutput) -> ModelRunnerOutput:
        assert is_open.wait(60)
        return execute(runner, work)

    monkeypatch.setattr(ScriptedRunner, "execute", execute_behind_a_gate)
    is_open.set()
    snapshot = service.start_replica(kv_tokens=KV_TOKENS).replica.snapshot
    async with service.caller() as caller:
        assert snapshot().expected_outputs == {}
        for _ in range(12):
            await caller.ask(service.request(PROMPT, max_tokens=256))
        ((scope, expected),) = snapshot().expected_outputs.items()
        assert scope == "scope"
        assert len(PROMPT) <= expected <= 2 * len(PROMPT)
        is_open.clear()
        # Any two of them might come to more than the whole pool.
        requests = [service.request(PROMPT, max_tokens=256) for _ in range(6)]
        answers = asyncio.gather(*(caller.ask(request) for request in requests))
        await asyncio.to_thread(
            until, lambda: snapshot().num_running + snapshot().num_waiting == len(requests)
        )
        is_open.set()
        assert [answer.text for answer in await answers] == [PROMPT.decode()] * 6
    assert snapshot().preemptions_total == 0


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
