"""What the platform costs is measured on real parts: engine, publisher, Valkey, whole service."""

import random
from pathlib import Path

import pytest

from benchmarks import gateway_cost, step_share
from benchmarks.control_plane import ControlPlane, measure
from benchmarks.platform_cost import PlatformCost, figures, replica_defaults, run_in_process
from benchmarks.serving import ServedWork
from benchmarks.simulated_fleet import Fleet
from benchmarks.step_share import StepLoad, StepShare
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer

WORK = ServedWork("served", num_requests=5, concurrency=2, prompt=8, output=3)


def scripted(delay_ms: float = 0.0) -> Engine:
    settings = EngineSettings()
    limits = ModelLimits(50_000, 4_096, frozenset({258}))
    runner = ScriptedRunner(limits, settings.num_blocks, settings.block_size, delay_ms=delay_ms)
    return Engine(runner, settings, execution=ThreadedExecution(runner))


def test_no_token_is_lost_between_a_small_fleet_and_its_gateways() -> None:
    result = measure(Fleet(3, 4, 50.0, num_gateways=2, num_publishers=1, num_steps=10))
    assert result.num_read == result.fleet.num_tokens == 120
    assert min(result.valkey_s, result.publishing_s, result.reading_s) > 0.0
    assert "tokens lost" in result.table()


def test_cores_are_those_of_the_rate_that_was_asked_for() -> None:
    fleet = Fleet()
    assert fleet.tokens_per_s == 84_000
    # Ten seconds' tokens took twenty seconds, in which Valkey computed for four.
    result = ControlPlane(fleet, 20.0, 4.0, 8.0, 2.0, fleet.num_tokens, 1.0)
    assert result.tokens_per_s == 42_000
    assert result.figures()["valkey_cores"] == pytest.approx(0.4)
    assert result.is_met
    assert not ControlPlane(fleet, 10.0, 5.1, 8.0, 2.0, fleet.num_tokens, 1.0).is_met
    assert not ControlPlane(fleet, 10.0, 4.0, 8.0, 2.0, fleet.num_tokens - 1, 1.0).is_met


def test_streams_in_process_are_replaced_until_all_have_ended() -> None:
    loop = EngineLoop(scripted())
    loop.start()
    try:
        assert run_in_process(loop, WORK, random.Random(1)) > 0.0
        assert loop.stats().running == 0
    finally:
        loop.stop(10)


def test_the_service_is_told_the_sizes_of_the_engine_beside_it() -> None:
    settings, words = replica_defaults()
    slots = settings.num_blocks * settings.block_size
    assert int(words["HEADRACE_KV_TOKENS"]) == slots
    assert float(words["HEADRACE_INTER_TOKEN_TARGET_MS"]) == 1000 * settings.inter_token_target_s


def test_a_steps_own_costs_are_those_of_its_threads(demo_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(demo_model_folder)
    load = StepLoad(num_sequences=4, prompt_tokens=400, num_steps=8)
    result = step_share.measure(scripted(delay_ms=2.0), tokenizer, load)
    assert result.step_ms > 2.0
    assert 0.0 < result.engine_ms < result.step_ms
    assert 0.0 < result.publisher_ms < result.step_ms
    assert "publish" in result.table()


def test_costs_are_judged_by_their_bars() -> None:
    load = StepLoad()
    cheap, dear = PlatformCost(WORK, [100.0], [91.0]), PlatformCost(WORK, [100.0], [89.0])
    assert cheap.is_met
    assert not dear.is_met
    assert StepShare(load, 100.0, 3.0, 1.9).is_met
    assert not StepShare(load, 100.0, 3.0, 2.1).is_met
    assert (
        round(float(str(figures(cheap, StepShare(load, 100.0, 3.0, 2.0))["platform_cost"])), 6)
        == 0.09
    )
    assert "11.0%" in dear.table()


def test_each_process_of_a_service_gets_its_share_of_the_time() -> None:
    cost = gateway_cost.GatewayCost(1_000, 2.0, {"gateway": 0.5, "Valkey": 0.1})
    assert cost.cores() == pytest.approx({"gateway": 42.0, "Valkey": 8.4})
    assert "500.0 us" in cost.table()
