"""The interference benchmark watches streams through the loop, as a reader would."""

from benchmarks.idle_machine import IdleMachine
from benchmarks.interference import SETTINGS, Load, watch
from engine.engine import Engine
from engine.execution.execution import ThreadedExecution
from engine.loop import EngineLoop

LOAD = Load(num_streams=3, long_prompt_tokens=1_000, num_warm_up=2, num_before=10)


def test_streams_are_timed_before_and_during_a_long_prompt() -> None:
    machine = IdleMachine(1)
    loop = EngineLoop(Engine(machine, SETTINGS, execution=ThreadedExecution(machine)))
    loop.start()
    prompts = [(number, *range(1, 20)) for number in range(1, LOAD.num_streams + 1)]
    result = watch(loop, prompts, tuple(range(1_000)), LOAD)
    assert loop.stop(10)
    assert len(result.before_ms) >= LOAD.num_streams * LOAD.num_before
    assert len(result.during_ms) >= 2
    assert result.first_token_s > 0.0
    assert "first token" in result.table()
