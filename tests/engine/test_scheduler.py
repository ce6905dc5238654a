import pytest

from engine.engine import Engine, EngineSettings
from engine.interface.generation_request import PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler import SchedulerLimits
from tests.engine.hash_runner import HashRunner
from tests.engine.orders import greedy, order, run_to_end

BATCH = PriorityClass.BATCH
ENDLESS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def build(**sizes: int) -> tuple[Engine, HashRunner]:
    settings = EngineSettings(
        **{
            "block_size": 4,
            "num_blocks": 64,
            "max_num_batched_tokens": 12,
            "chunk_size": 8,
            "max_num_seqs": 4,
        }
        | sizes
    )
    runner = HashRunner(settings.num_blocks, settings.block_size)
    return Engine(runner, settings, clock=lambda: 0.0, monotonic=lambda: 0.0), runner


def names_of(runner: HashRunner, step: int) -> list[str]:
    return [sequence.request_id for sequence in runner.steps[step].sequences]


def test_long_prompts_never_stall_a_sequence_that_is_talking() -> None:
    engine, runner = build()
    engine.add(order("talker", (1, 2), ENDLESS, priority_class=BATCH))
    engine.step()
    for i in range(3):
        engine.add(order(f"long-{i}", tuple(range(1, 40)), greedy(1)))
    run_to_end(engine)
    talking = [step for step in range(len(runner.steps)) if "talker" in names_of(runner, step)]
    assert talking == list(range(20))
    assert "long-0" in names_of(runner, 1)


def test_no_step_exceeds_the_token_budget_and_no_sequence_its_chunk() -> None:
    engine, runner = build()
    for i in range(4):
        engine.add(order(str(i), tuple(range(1, 31)), greedy(3)))
    run_to_end(engine)
    assert max(work.num_tokens for work in runner.steps) == 12
    assert max(len(s.token_ids) for work in runner.steps for s in work.sequences) == 8


def test_interactive_requests_are_computed_before_batch_ones() -> None:
    engine, runner = build(max_num_seqs=3)
    for i in range(3):
        engine.add(order(f"batch-{i}", tuple(range(1, 9)), greedy(2), priority_class=BATCH))
    engine.add(order("interactive", tuple(range(1, 9)), greedy(2)))
    engine.step()
    assert names_of(runner, 0)[0] == "interactive"
    assert engine.stats().running == 3


def test_an_interactive_prompt_passes_a_batch_prompt_that_is_half_computed() -> None:
    engine, runner = build()
    engine.add(order("batch", tuple(range(1, 40)), greedy(2), priority_class=BATCH))
    engine.step()
    engine.add(order("interactive", tuple(range(1, 30)), greedy(2)))
    engine.step()
    first, second = runner.steps[1].sequences
    assert (first.request_id, len(first.token_ids)) == ("interactive", 8)
    assert (second.request_id, len(second.token_ids)) == ("batch", 4)


def test_no_token_is_computed_twice() -> None:
    engine, runner = build()
    for i in range(6):
        engine.add(order(str(i), tuple(range(1, 20 + i)), ENDLESS))
    run_to_end(engine)
    positions = [
        (sequence.request_id, position)
        for work in runner.steps
        for sequence in work.sequences
        for position in range(sequence.start, sequence.end)
    ]
    assert len(positions) == len(set(positions))
    # The token sampled last is never computed.
    assert len(positions) == sum(19 + i + 20 - 1 for i in range(6))


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    engine, runner = build(num_blocks=4)
    engine.add(order("first", (1,), SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.add(order("large", (1,) * 8, greedy(1)))
    engine.add(order("small", (1,), greedy(1)))
    engine.step()
    assert engine.stats().running == 1
    run_to_end(engine)
    first_seen = [
        next(i for i in range(len(runner.steps)) if name in names_of(runner, i))
        for name in ("first", "large", "small")
    ]
    assert first_seen[0] < first_seen[1] <= first_seen[2]


def test_at_most_max_num_seqs_run() -> None:
    engine, runner = build(max_num_seqs=2)
    for i in range(5):
        engine.add(order(str(i), (1, 2), greedy(4)))
    run_to_end(engine)
    assert max(len(work.sequences) for work in runner.steps) == 2


def test_only_the_last_chunk_of_a_debt_is_sampled() -> None:
    engine, runner = build()
    engine.add(order("one", tuple(range(1, 21)), greedy(1)))
    run_to_end(engine)
    assert [work.sequences[0].is_sampled for work in runner.steps] == [False, False, True]
    assert [work.sequences[0].start for work in runner.steps] == [0, 8, 16]


def test_a_budget_too_small_for_all_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerLimits(max_num_batched_tokens=3, chunk_size=8, max_num_seqs=4, max_waiting=8)
