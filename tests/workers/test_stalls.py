"""A replica whose engine hangs takes nothing new, and goes on by itself when it moves again."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.scripted_runner import ScriptedRunner
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.workers.service import Service, until


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a dispatcher and no replica yet."""
    service = Service(database_url, redis_url, tmp_path)
    service.start_dispatcher()
    yield service
    service.close()


async def test_a_stalled_replica_accepts_nothing_until_it_moves_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, execute = threading.Event(), ScriptedRunner.execute

    def execute_behind_a_gate(runner: ScriptedRunner, work: SchedulerOutput) -> ModelRunnerOutput:
        assert is_open.wait(60)
        return execute(runner, work)

    monkeypatch.setattr(ScriptedRunner, "execute", execute_behind_a_gate)
    is_open.set()
    snapshot = service.start_replica().replica.snapshot
    async with service.caller() as caller:
        # Enough steps for the engine to know how long they take.
        await caller.ask(service.request(b"x" * 40))
        is_open.clear()
        asking = asyncio.create_task(caller.ask(service.request(b"again")))
        await asyncio.to_thread(until, lambda: snapshot().is_stalled)
        assert not snapshot().is_accepting
        assert snapshot().stalls_total == 1
        is_open.set()
        assert (await asking).text == "again"
    until(lambda: snapshot().is_accepting)
    assert not snapshot().is_stalled
    assert snapshot().stalls_total == 1
