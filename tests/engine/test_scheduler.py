from collections import defaultdict
from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.interface.generation_request import PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.admission import MAX_PREEMPTIONS
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.scheduler_output import ScheduledSequence
from tests.engine.hash_runner import HashRunner, words_alone
from tests.engine.orders import Transcript, greedy, order, run_to_end
from tests.engine.sequences import Expecting

BATCH = PriorityClass.BATCH
BLOCK_SIZE = 4


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def build(expected: int = 1_000_000, **sizes: int) -> tuple[Engine, HashRunner]:
    """An engine that expects so many tokens of everybody; by default all that may come."""
    settings = EngineSettings(
        **{
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "max_num_batched_tokens": 12,
            "chunk_size": 8,
            "max_num_seqs": 4,
        }
        | sizes
    )
    runner = HashRunner(settings.num_blocks, settings.block_size, settings.num_host_blocks)
    engine = Engine(
        runner,
        settings,
        predictor=Expecting(expected),
        clock=lambda: 0.0,
        monotonic=lambda: 0.0,
    )
    return engine, runner


def rows_of(runner: HashRunner, step: int) -> tuple[ScheduledSequence, ...]:
    return runner.steps[step].sequences(BLOCK_SIZE)


def all_rows(runner: HashRunner) -> Iterator[ScheduledSequence]:
    for step in range(len(runner.steps)):
        yield from rows_of(runner, step)


def names_of(runner: HashRunner, step: int) -> list[str]:
    return [row.request_id for row in rows_of(runner, step)]


def first_step_of(runner: HashRunner, name: str) -> int:
    return next(step for step in range(len(runner.steps)) if name in names_of(runner, step))


def own_prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt that begins like no other."""
    return (number + 1, *(1 + i % 40 for i in range(num_tokens - 1)))


# --- dividing a step


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_long_prompts_never_stall_a_sequence_that_is_talking(is_overlapped: bool) -> None:
    engine, runner = build()
    engine.add(order("talker", (1, 2), endless(20), priority_class=BATCH))
    engine.step()
    for i in range(3):
        engine.add(order(f"long-{i}", own_prompt(i, 39), greedy(1)))
    run_to_end(engine, is_overlapped=is_overlapped)
    talking = [step for step in range(len(runner.steps)) if "talker" in names_of(runner, step)]
    assert talking == list(range(20))
    assert "long-0" in names_of(runner, 1)


def test_no_step_exceeds_the_token_budget_and_no_sequence_its_chunk() -> None:
    engine, runner = build()
    for i in range(4):
        engine.add(order(str(i), own_prompt(i, 30), greedy(3)))
    run_to_end(engine)
    assert max(work.num_tokens for work in runner.steps) == 12
    assert max(len(row.token_ids) for row in all_rows(runner)) == 8


def test_a_chunk_is_a_chunk_however_large_the_step() -> None:
    engine, runner = build(max_num_batched_tokens=200)
    for i in range(4):
        engine.add(order(str(i), own_prompt(i, 30), greedy(3)))
    run_to_end(engine)
    assert max(len(row.token_ids) for row in all_rows(runner)) == 8


def test_interactive_requests_are_computed_before_batch_ones() -> None:
    engine, runner = build(max_num_seqs=3)
    for i in range(3):
        engine.add(order(f"batch-{i}", own_prompt(i, 8), endless(2), priority_class=BATCH))
    engine.add(order("interactive", own_prompt(9, 8), endless(2)))
    engine.step()
    assert names_of(runner, 0)[0] == "interactive"
    assert engine.stats().running == 3


def test_an_interactive_prompt_passes_a_batch_prompt_that_is_half_computed() -> None:
    engine, runner = build()
    engine.add(order("batch", own_prompt(0, 39), greedy(2), priority_class=BATCH))
    engine.step()
    engine.add(order("interactive", own_prompt(1, 29), greedy(2)))
    engine.step()
    first, second = rows_of(runner, 1)
    assert (first.request_id, len(first.token_ids)) == ("interactive", 8)
    assert (second.request_id, len(second.token_ids)) == ("batch", 4)


def test_a_short_prompt_need_not_wait_for_long_ones() -> None:
    engine, runner = build()
    for i in range(3):
        engine.add(order(f"long-{i}", own_prompt(i, 60), greedy(1)))
    engine.step()
    engine.add(order("short", own_prompt(7, 6), greedy(1)))
    engine.step()
    assert "short" in names_of(runner, 1)
    assert len(rows_of(runner, 1)) > 1


def test_short_prompts_without_end_do_not_keep_a_long_one_waiting() -> None:
    engine, _ = build(max_num_batched_tokens=8)
    engine.add(order("long", own_prompt(0, 40), greedy(1)))
    transcript = Transcript()
    for i in range(24):
        for j in range(2):
            engine.add(order(f"short-{i}-{j}", (i + 1, j + 1, 1, 2, 3, 4, 5), greedy(1)))
        transcript.note(engine.step())
    assert ("long", 0) in transcript.ends


def test_no_token_is_computed_twice() -> None:
    engine, runner = build()
    for i in range(6):
        engine.add(order(str(i), own_prompt(i, 19 + i), endless(20)))
    run_to_end(engine)
    positions = [
        (row.request_id, position)
        for row in all_rows(runner)
        for position in range(row.start, row.end)
    ]
    assert len(positions) == len(set(positions))
    # The token sampled last is never computed.
    assert len(positions) == sum(19 + i + 20 - 1 for i in range(6))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_common_prompt_is_computed_once(is_overlapped: bool) -> None:
    engine, runner = build()
    prompt = own_prompt(0, 33)
    for i in range(6):
        engine.add(order(str(i), prompt, greedy(1)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    assert sum(work.num_tokens for work in runner.steps) == 33 + 5
    assert sorted(transcript.num_cached_tokens.values()) == [0, *[32] * 5]
    assert engine.stats().cached_tokens_total == 5 * 32


def test_only_the_last_chunk_of_a_debt_is_sampled() -> None:
    engine, runner = build()
    engine.add(order("one", own_prompt(0, 20), greedy(1)))
    run_to_end(engine)
    assert [row.is_sampled for row in all_rows(runner)] == [False, False, True]
    assert [row.start for row in all_rows(runner)] == [0, 8, 16]


# --- joining


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    engine, runner = build(num_blocks=4)
    engine.add(order("first", (1,), endless(9)))
    engine.add(order("large", (2,) * 8, greedy(1)))
    engine.add(order("small", (3,), greedy(1)))
    engine.step()
    assert engine.stats().running == 1
    run_to_end(engine)
    steps = [first_step_of(runner, name) for name in ("first", "large", "small")]
    assert steps[0] < steps[1] <= steps[2]


def test_a_sequence_joins_only_beside_what_the_running_ones_are_expected_to_become() -> None:
    for expected, num_running in ((1_000_000, 1), (4, 4)):
        engine, _ = build(expected, num_blocks=20)
        for i in range(4):
            engine.add(order(str(i), (i + 1, 1, 1), endless(45)))
        engine.step()
        assert engine.stats().running == num_running


def test_at_most_max_num_seqs_run() -> None:
    engine, runner = build(max_num_seqs=2)
    for i in range(5):
        engine.add(order(str(i), (1, 2), greedy(4)))
    run_to_end(engine)
    assert max(work.num_rows for work in runner.steps) == 2


def test_an_interactive_request_takes_the_slot_of_the_youngest_batch_one() -> None:
    engine, runner = build(max_num_seqs=3)
    transcript = Transcript()
    for i in range(3):
        engine.add(order(f"batch-{i}", own_prompt(i, 5), endless(12), priority_class=BATCH))
    for _ in range(3):
        transcript.note(engine.step())
    engine.add(order("interactive", own_prompt(5, 5), endless(4)))
    transcript.note(engine.step())
    assert set(names_of(runner, 3)) == {"batch-0", "batch-1", "interactive"}
    assert engine.stats().preemptions_total == 1
    run_to_end(engine, transcript)
    for i in range(3):
        assert len(transcript.token_ids[f"batch-{i}", 0]) == 12


def test_batch_ones_keep_their_place_when_giving_it_up_would_not_be_enough() -> None:
    engine, _ = build(num_blocks=20)
    engine.add(order("reader", own_prompt(0, 44), endless(4)))
    engine.add(order("batch", own_prompt(1, 5), endless(12), priority_class=BATCH))
    engine.step()
    assert engine.stats().running == 2
    engine.add(order("too-large", own_prompt(2, 40), endless(8)))
    engine.step()
    assert engine.stats().preemptions_total == 0
    assert engine.stats().running == 2
    run_to_end(engine)


def test_batch_ones_give_way_when_that_is_enough() -> None:
    engine, runner = build(num_blocks=20)
    for i in range(2):
        engine.add(order(f"batch-{i}", own_prompt(i, 9), endless(20), priority_class=BATCH))
    engine.step()
    engine.add(order("large", own_prompt(2, 30), endless(10)))
    transcript = Transcript()
    transcript.note(engine.step())
    assert "large" in names_of(runner, 1)
    run_to_end(engine, transcript)
    assert all(len(transcript.token_ids[f"batch-{i}", 0]) == 20 for i in range(2))


def test_what_would_make_way_for_readers_is_told() -> None:
    engine, _ = build(num_blocks=32, max_num_batched_tokens=64, chunk_size=64)
    engine.add(order("reader", own_prompt(0, 13), endless(3)))
    engine.step()
    before = engine.stats()
    assert (before.running_interactive, before.running_yielding, before.yielding_tokens) == (
        1,
        0,
        0,
    )
    for i in range(2):
        engine.add(order(f"batch-{i}", own_prompt(1 + i, 9), endless(23), priority_class=BATCH))
    engine.step()
    full = engine.stats()
    assert (full.running, full.running_interactive, full.running_yielding) == (3, 1, 2)
    assert full.projected_free_tokens + full.yielding_tokens == before.projected_free_tokens
    run_to_end(engine)
    assert engine.stats().running_yielding == 0


def test_who_cannot_be_stopped_is_not_said_to_make_way() -> None:
    engine, _ = build(max_num_seqs=1)
    engine.add(order("batch", (1, 2), endless(40), priority_class=BATCH))
    engine.step()
    for number in range(3):
        assert engine.stats().running_yielding == 1
        engine.add(order(f"reader-{number}", own_prompt(number, 5), endless(3)))
        for _ in range(6):
            engine.step()
    stats = engine.stats()
    assert (stats.running, stats.running_yielding, stats.yielding_tokens) == (1, 0, 0)


# --- losing one's place


def test_a_batch_one_makes_way_for_readers_three_times_and_then_keeps_its_place() -> None:
    engine, _ = build(max_num_seqs=1)
    transcript = Transcript()
    engine.add(order("batch", (1, 2), endless(40), priority_class=BATCH))
    for number in range(8):
        engine.add(order(f"reader-{number}", own_prompt(number, 5), endless(3)))
        # Long enough for the reader to end and the batch one to be back.
        for _ in range(6):
            transcript.note(engine.step())
    assert engine.stats().preemptions_total == MAX_PREEMPTIONS
    run_to_end(engine, transcript)
    assert len(transcript.token_ids["batch", 0]) == 40
    assert {len(words) for words in transcript.token_ids.values()} == {3, 40}


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_when_blocks_run_out_the_youngest_loses_its_place_and_says_the_same_words(
    is_overlapped: bool,
) -> None:
    engine, runner = build(expected=1, num_blocks=16)
    for i in range(4):
        engine.add(order(str(i), own_prompt(i, 6), endless(30)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    assert engine.stats().preemptions_total > 0
    ends = list(transcript.ends)
    assert ends == [(str(i), 0) for i in range(4)], "the oldest goes on"
    epochs: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for work in runner.steps:
        for spec, slot, epoch in zip(work.specs, work.slots, work.epochs, strict=True):
            epochs[spec.request_id].add((int(slot), int(epoch)))
    assert len(epochs["0"]) == 1, "the oldest never lost its place"
    for name, places in epochs.items():
        assert len(places) - 1 <= MAX_PREEMPTIONS, f"{name} lost its place too often"


def test_batch_ones_lose_their_place_before_older_interactive_ones_do() -> None:
    engine, _ = build(expected=1, num_blocks=12)
    engine.add(order("batch", own_prompt(0, 6), endless(30), priority_class=BATCH))
    transcript = Transcript()
    transcript.note(engine.step())
    for i in range(2):
        engine.add(order(f"reader-{i}", own_prompt(1 + i, 6), endless(12)))
    run_to_end(engine, transcript)
    assert engine.stats().preemptions_total > 0
    assert list(transcript.ends)[-1] == ("batch", 0)
    assert len(transcript.token_ids["batch", 0]) == 30


def test_who_lost_its_place_finds_its_kv_again() -> None:
    engine, runner = build(max_num_seqs=1)
    prompt = own_prompt(0, 17)
    transcript = Transcript()
    engine.add(order("batch", prompt, SamplingParams(max_tokens=9, seed=7), priority_class=BATCH))
    for _ in range(5):
        transcript.note(engine.step())
    engine.add(order("reader", own_prompt(1, 5), endless(3)))
    run_to_end(engine, transcript)
    words = words_alone(prompt, 9, seed=7)
    assert len(words) > 3
    assert transcript.token_ids["batch", 0] == words
    computed = [
        position
        for row in all_rows(runner)
        if row.request_id == "batch"
        for position in range(row.start, row.end)
    ]
    assert engine.stats().preemptions_total == 1
    assert len(computed) == len(set(computed))


def test_a_sequence_whose_next_token_is_on_its_way_does_not_join_without_it() -> None:
    engine, _ = build(max_num_seqs=1)
    transcript = Transcript()
    engine.add(order("batch", own_prompt(0, 5), endless(9), priority_class=BATCH))
    for _ in range(3):
        transcript.note(engine.step_overlapped())
    # It loses its place in the step in which its third token is being sampled.
    engine.add(order("reader", own_prompt(1, 5), endless(2)))
    transcript.note(engine.step_overlapped())
    assert engine.stats().preemptions_total == 1
    engine.cancel("reader")
    run_to_end(engine, transcript, is_overlapped=True)
    assert len(transcript.token_ids["batch", 0]) == 9
    engine.check()


def test_ends_teach_the_predictor_and_waiting_in_vain_does_not() -> None:
    predictor = Expecting()
    runner = HashRunner(64, BLOCK_SIZE)
    settings = EngineSettings(block_size=BLOCK_SIZE, num_blocks=64, max_num_seqs=1)
    engine = Engine(runner, settings, predictor=predictor, clock=lambda: 0.0, monotonic=lambda: 0.0)
    engine.add(order("cut", (1, 2), endless(5), cache_scope="x"))
    engine.add(order("waiting", (1, 2), endless(5)))
    engine.step()
    engine.cancel("waiting")
    run_to_end(engine)
    assert predictor.seen == [("x", 5, False)]
    words = words_alone((7, 7), 8)
    stop = SamplingParams(max_tokens=8, stop_token_ids=(words[2],))
    engine.add(order("complete", (7, 7), stop))
    run_to_end(engine)
    assert predictor.seen[1:] == [("scope", words.index(words[2]) + 1, True)]


def test_a_budget_too_small_for_all_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerLimits(max_num_batched_tokens=3, chunk_size=8, max_num_seqs=4, max_waiting=8)


@pytest.mark.parametrize("name", ["chunk_size", "max_num_seqs", "max_waiting"])
def test_limits_without_room_are_refused(name: str) -> None:
    sizes = {"max_num_batched_tokens": 8, "chunk_size": 8, "max_num_seqs": 4, "max_waiting": 8}
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**(sizes | {name: 0}))


@pytest.mark.parametrize(("high", "low"), [(1.1, 0.9), (0.8, 0.9), (0.5, 0.0)])
def test_watermarks_that_are_no_parts_of_a_pool_are_refused(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="watermarks"):
        SchedulerLimits(8, 8, 4, 8, high_watermark=high, low_watermark=low)


def test_batch_sequences_that_share_do_not_lose_their_places_in_vain() -> None:
    engine, _ = build(num_blocks=24, max_num_batched_tokens=64, chunk_size=64)
    engine.add(order("reader", own_prompt(0, 35), endless(9)))
    sharing = SamplingParams(max_tokens=8, n=3, ignore_eos=True)
    engine.add(order("batch", own_prompt(1, 24), sharing, priority_class=BATCH))
    engine.step()
    engine.step()
    engine.add(order("too-large", own_prompt(2, 50), endless(4)))
    engine.step()
    # Stopping all three would free what they hold together, which is not enough.
    assert engine.stats().preemptions_total == 0
    run_to_end(engine)


def test_a_shortage_is_not_over_because_it_would_be_if_others_had_gone() -> None:
    engine, _ = build(num_blocks=100, max_num_batched_tokens=600, chunk_size=600, max_num_seqs=8)
    engine.add(order("reader", own_prompt(0, 200), endless(4)))
    engine.add(order("batch", own_prompt(1, 160), endless(4), priority_class=BATCH))
    engine.step()
    engine._scheduler.roster.admission.note_shortage()
    engine.add(order("large", own_prompt(2, 240), endless(4)))
    engine.add(order("small", own_prompt(3, 4), endless(4), priority_class=BATCH))
    engine.step()
    assert engine.stats().running == 2
    assert engine.stats().preemptions_total == 0
    run_to_end(engine)


def test_batch_sequences_that_cannot_be_stopped_hold_at_most_half_of_the_places() -> None:
    engine, _ = build(num_blocks=1024, max_num_seqs=8)
    for number in range(16):
        prompt = own_prompt(number, 8)
        engine.add(order(f"batch-{number}", prompt, endless(200), priority_class=BATCH))
    for number in range(120):
        for _ in range(3):
            engine.step()
        engine.add(order(f"reader-{number}", own_prompt(16 + number % 30, 4), endless(4)))
    running = engine._scheduler.roster.running
    is_fixed = running.is_used & running.is_guaranteed & ~running.is_interactive
    assert engine.stats().preemptions_total >= 12
    assert 1 <= int(is_fixed.sum()) <= 4
    run_to_end(engine)
