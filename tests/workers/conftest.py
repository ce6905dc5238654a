"""A service for each test, and a gate before its engine's steps."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.scripted_runner import ScriptedRunner
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.workers.service import Service

PATIENCE_S = 60


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a dispatcher and no replica yet."""
    service = Service(database_url, redis_url, tmp_path)
    service.start_dispatcher()
    yield service
    service.close()


@pytest.fixture
def step_gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Open at first. While it is clear, no step of the scripted model is computed."""
    is_open, execute = threading.Event(), ScriptedRunner.execute
    is_open.set()

    def execute_behind_the_gate(runner: ScriptedRunner, work: SchedulerOutput) -> ModelRunnerOutput:
        assert is_open.wait(PATIENCE_S)
        return execute(runner, work)

    monkeypatch.setattr(ScriptedRunner, "execute", execute_behind_the_gate)
    return is_open
