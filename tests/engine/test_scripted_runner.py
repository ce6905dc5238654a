from engine.engine import Engine, EngineSettings
from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.orders import greedy, order, run_to_end

LIMITS = ModelLimits(vocab_size=1000, max_model_len=500, eos_token_ids=frozenset({2}))


def build(delay_ms: float = 0.0, slept: list[float] | None = None) -> Engine:
    settings = EngineSettings(num_blocks=20, block_size=4, chunk_size=7)
    sleep = (slept if slept is not None else []).append
    runner = ScriptedRunner(LIMITS, 80, 4, delay_ms=delay_ms, sleep=sleep)
    return Engine(runner, settings)


def test_it_says_its_prompt_back_and_stops() -> None:
    engine = build()
    engine.add(order("a", (11, 12, 13), greedy(9)))
    engine.add(order("b", tuple(range(100, 120)), greedy(40)))
    transcript = run_to_end(engine)
    assert transcript.token_ids["a", 0] == [11, 12, 13, 2]
    assert transcript.token_ids["b", 0] == [*range(100, 120), 2]
    assert transcript.ends["a", 0] is SequenceEnd.STOP


def test_it_goes_on_after_resumed_tokens() -> None:
    engine = build()
    engine.add(order("a", (11, 12, 13), greedy(9), resumed=((11, 12),)))
    assert run_to_end(engine).token_ids["a", 0] == [13, 2]


def test_it_repeats_its_end_when_told_to_ignore_it() -> None:
    engine = build()
    engine.add(order("a", (11,), SamplingParams(max_tokens=4, ignore_eos=True)))
    assert run_to_end(engine).token_ids["a", 0] == [11, 2, 2, 2]


def test_each_step_takes_the_given_time() -> None:
    slept: list[float] = []
    engine = build(25.0, slept)
    engine.add(order("a", (11, 12), greedy(9)))
    run_to_end(engine)
    assert slept == [0.025] * 3
