"""What went wrong in other engines of this kind, as claims about this one.

The model is the one that hears every token, so each claim comes with the exact words.
"""

from collections import Counter
from random import Random

import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import MAX_SEQUENCES, GenerationRequest, PriorityClass
from engine.interface.sampling_params import MAX_CHOICES, SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.any_schedule import AnySchedule, Cancel, FixedPredictor, Move, Sizes, Steps
from tests.engine.hash_runner import VOCAB_SIZE, HashRunner, words_alone
from tests.engine.orders import Transcript, greedy, order, run_to_end
from tests.engine.random_schedules import random_join

BATCH = PriorityClass.BATCH

both_loops = pytest.mark.parametrize("is_overlapped", [False, True], ids=["simple", "overlapped"])
every_predictor = pytest.mark.parametrize("predictor", ["safe", "liar"])


def build(predictor: str | None = "safe", **sizes: int) -> tuple[Engine, HashRunner]:
    settings = EngineSettings(
        **{
            "block_size": 4,
            "num_blocks": 64,
            "max_num_batched_tokens": 24,
            "chunk_size": 8,
            "max_num_seqs": 8,
        }
        | sizes
    )
    runner = HashRunner(settings.num_blocks, settings.block_size, settings.num_host_blocks)
    engine = Engine(
        runner,
        settings,
        predictor=FixedPredictor(predictor) if predictor else None,
        clock=lambda: 0.0,
        monotonic=lambda: 0.0,
    )
    return engine, runner


def advance(engine: Engine, transcript: Transcript, *, is_overlapped: bool) -> None:
    transcript.note(engine.step_overlapped() if is_overlapped else engine.step())
    engine.check()


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens))


def seed_without_end(prompt: tuple[int, ...], max_tokens: int) -> int:
    """A seed with which the model says all of max_tokens."""
    return next(
        seed
        for seed in range(10_000)
        if len(words_alone(prompt, max_tokens, seed=seed)) == max_tokens
    )


def rows_of(runner: HashRunner, request_id: str) -> list[tuple[int, int]]:
    """(epoch, start) of every row of a request, in order."""
    return [
        (int(work.epochs[row]), int(work.starts[row]))
        for work in runner.steps
        for row, spec in enumerate(work.specs)
        if spec.request_id == request_id
    ]


# --- preemption


def test_failed_admissions_evictions_and_shared_prefixes_change_no_word() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng = Random(seed)
        schedule = AnySchedule(
            Sizes(
                block_size=2 + seed % 3,
                num_blocks=12,
                num_host_blocks=seed % 2 * 6,
                max_num_seqs=4,
                spare_budget=8,
            )
        )
        for number in range(14):
            schedule.apply(random_join(rng, number, schedule.sizes))
            schedule.apply(Steps(rng.randint(0, 6), is_overlapped=rng.random() < 0.5))
        schedule.finish()
        seen += schedule.tally
    assert seen["preemptions"] > 12
    assert seen["hits"] > 60


@both_loops
@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_an_answer_preempted_three_times_misses_and_repeats_no_word(
    num_host_blocks: int, is_overlapped: bool
) -> None:
    prompt = prompt_of(8)
    seed = seed_without_end(prompt, 200)
    engine, runner = build(
        "liar", num_blocks=60, num_host_blocks=num_host_blocks, max_num_batched_tokens=64
    )
    sampling = SamplingParams(max_tokens=200, seed=seed)
    engine.add(order("victim", prompt, sampling, priority_class=BATCH))
    transcript = Transcript()
    loud = SamplingParams(max_tokens=100, ignore_eos=True)
    num_loud = 0
    while engine.has_work:
        if engine.stats().running + engine.stats().waiting == 1:
            for _ in range(2):
                engine.add(order(f"loud-{num_loud}", prompt_of(4, seed=num_loud), loud))
                num_loud += 1
        advance(engine, transcript, is_overlapped=is_overlapped)
        if ("victim", 0) in transcript.ends:
            break
    num_comebacks = len({epoch for epoch, _ in rows_of(runner, "victim")}) - 1
    assert num_comebacks == 3
    assert transcript.token_ids["victim", 0] == words_alone(prompt, 200, seed=seed)
    assert transcript.ends["victim", 0] is SequenceEnd.LENGTH


@both_loops
@every_predictor
def test_a_huge_request_that_passes_half_computed_ones_strands_nobody(
    predictor: str, is_overlapped: bool
) -> None:
    engine, _ = build(predictor, num_blocks=20, max_num_batched_tokens=8)
    transcript = Transcript()
    prompts = {"first": prompt_of(36, 1), "second": prompt_of(36, 2), "huge": prompt_of(70, 3)}
    for name in ("first", "second"):
        engine.add(order(name, prompts[name], greedy(4), priority_class=BATCH))
    for _ in range(4):
        advance(engine, transcript, is_overlapped=is_overlapped)
    assert not transcript.token_ids["first", 0]
    engine.add(order("huge", prompts["huge"], greedy(8)))
    run_to_end(engine, transcript, is_overlapped=is_overlapped)
    for name, prompt in prompts.items():
        max_tokens = 8 if name == "huge" else 4
        assert transcript.token_ids[name, 0] == words_alone(prompt, max_tokens)


@pytest.mark.parametrize(
    ("predictor", "most_each", "is_overlapped"),
    [("safe", 0, False), (None, 1, False), (None, 1, True), ("liar", 2, True)],
)
def test_equals_over_capacity_do_not_push_each_other_out_in_turn(
    predictor: str | None, most_each: int, is_overlapped: bool
) -> None:
    engine, runner = build(predictor, num_blocks=64, max_num_seqs=16)
    transcript = Transcript()
    loud = SamplingParams(max_tokens=40, ignore_eos=True)
    num_added = num_said = num_silent = 0
    for _ in range(1000):
        while engine.stats().running + engine.stats().waiting < 16:
            engine.add(order(str(num_added), prompt_of(20, num_added), loud))
            num_added += 1
        advance(engine, transcript, is_overlapped=is_overlapped)
        said = sum(map(len, transcript.token_ids.values()))
        num_silent = 0 if said > num_said else num_silent + 1
        num_said = said
        assert num_silent < 20, "nobody gets on"
    assert engine.stats().preemptions_total <= most_each * num_added
    assert all(
        len({epoch for epoch, _ in rows_of(runner, str(name))}) <= 4 for name in range(num_added)
    )
    oldest_first = [int(request_id) for request_id, _ in transcript.ends]
    assert len(oldest_first) > 60
    assert max(abs(place - name) for place, name in enumerate(oldest_first)) < 32


# --- sizes that do not fit


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(80, 4), (60, 5), (1, 64)])
def test_what_can_never_fit_is_refused_at_once_and_holds_up_nobody(
    num_prompt: int, max_tokens: int
) -> None:
    engine, _ = build(num_blocks=16)
    engine.add(order("before", prompt_of(9, 1), greedy(6)))
    with pytest.raises(InvalidRequest, match="KV cache"):
        engine.add(order("never", prompt_of(num_prompt), greedy(max_tokens)))
    engine.add(order("after", prompt_of(9, 2), greedy(6)))
    transcript = run_to_end(engine)
    assert transcript.token_ids["before", 0] == words_alone(prompt_of(9, 1), 6)
    assert transcript.token_ids["after", 0] == words_alone(prompt_of(9, 2), 6)
    assert ("never", 0) not in transcript.ends


@both_loops
@every_predictor
@pytest.mark.parametrize("num_prompts", [1, MAX_SEQUENCES // MAX_CHOICES])
def test_the_most_choices_finish_in_a_pool_that_holds_two(
    num_prompts: int, predictor: str, is_overlapped: bool
) -> None:
    engine, _ = build(predictor, num_blocks=16)
    prompts = tuple(prompt_of(21, seed) for seed in range(num_prompts))
    request = GenerationRequest(
        request_id="many",
        prompts=prompts,
        sampling=SamplingParams(max_tokens=20, n=MAX_CHOICES, seed=3),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="scope",
        arrival=0.0,
        deadline_at=1e12,
    )
    engine.add(request)
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    for choice in range(request.num_choices):
        alone = words_alone(request.prompt_of(choice), 20, seed=3, choice=choice)
        assert transcript.token_ids["many", choice] == alone


# --- the prefix cache


@both_loops
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
@pytest.mark.parametrize("num_others", [0, 5])
def test_a_warm_suffix_says_the_same_in_any_company_and_any_chunks(
    num_others: int, chunk_size: int, is_overlapped: bool
) -> None:
    engine, _ = build(chunk_size=chunk_size, max_num_batched_tokens=72, num_blocks=128)
    shared = prompt_of(23)
    engine.add(order("cold", shared, greedy(6)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    prompts = {
        f"warm-{i}": shared[: 23 - i % 3] + prompt_of(7 + i, seed=i) for i in range(1 + num_others)
    }
    for name, prompt in prompts.items():
        engine.add(order(name, prompt, greedy(9)))
    run_to_end(engine, transcript, is_overlapped=is_overlapped)
    for name, prompt in prompts.items():
        assert transcript.token_ids[name, 0] == words_alone(prompt, 9)
        assert transcript.num_cached_tokens[name, 0] >= 20


@both_loops
def test_a_burst_that_shares_a_long_beginning_computes_it_once(is_overlapped: bool) -> None:
    engine, runner = build(
        block_size=16,
        num_blocks=1024,
        max_num_batched_tokens=128,
        chunk_size=64,
        max_num_seqs=32,
    )
    shared = prompt_of(768)
    prompts = {str(i): (*shared, 1 + i, *prompt_of(31, seed=i)) for i in range(32)}
    for name, prompt in prompts.items():
        engine.add(order(name, prompt, greedy(1)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    for name, prompt in prompts.items():
        assert transcript.token_ids[name, 0] == words_alone(prompt, 1)
    assert sum(work.num_tokens for work in runner.steps) <= 1.1 * (768 + 32 * 32)


@both_loops
@pytest.mark.parametrize("num_prompt", [256, 255, 253])
def test_four_choices_keep_their_prompt_once(num_prompt: int, is_overlapped: bool) -> None:
    most_used, computed = {}, {}
    for n in (1, 4):
        engine, runner = build(num_blocks=512)
        engine.add(order("a", prompt_of(num_prompt), SamplingParams(max_tokens=4, n=n, seed=1)))
        most_used[n] = 0
        while engine.has_work:
            advance(engine, Transcript(), is_overlapped=is_overlapped)
            used = engine.stats().kv_blocks_total - engine.stats().kv_blocks_free
            most_used[n] = max(most_used[n], used)
        computed[n] = sum(work.num_tokens for work in runner.steps)
    assert most_used[4] <= 1.3 * most_used[1]
    assert computed[4] <= 1.3 * computed[1]


@both_loops
def test_a_prefix_is_found_again_in_its_own_scope_and_in_no_other(is_overlapped: bool) -> None:
    engine, runner = build()
    prompt = prompt_of(40)
    for name, scope in (("first", "a"), ("stranger", "b"), ("again", "a")):
        engine.add(order(name, prompt, greedy(4), cache_scope=scope))
        transcript = run_to_end(engine, is_overlapped=is_overlapped)
        assert transcript.token_ids[name, 0] == words_alone(prompt, 4)
        cached = transcript.num_cached_tokens[name, 0]
        assert cached == rows_of(runner, name)[0][1]
        assert cached >= 36 if name == "again" else cached == 0
    assert engine.stats().cached_tokens_total == cached


# --- one row's trouble


@both_loops
@pytest.mark.parametrize("faulty_position", [3, 13, 20, 23], ids=str)
def test_what_a_failed_row_computed_is_never_used_again(
    faulty_position: int, is_overlapped: bool
) -> None:
    engine, runner = build()
    prompt = prompt_of(21)
    bystander = prompt_of(11, seed=1)
    seed = seed_without_end(prompt, 8)
    runner.faults.add(("faulty", 0, faulty_position))
    engine.add(order("faulty", prompt, SamplingParams(max_tokens=8, seed=seed)))
    engine.add(order("bystander", bystander, greedy(12)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    assert transcript.ends["faulty", 0] is SequenceEnd.ERROR
    said = transcript.token_ids["faulty", 0]
    assert said == words_alone(prompt, 8, seed=seed)[: len(said)]
    assert transcript.token_ids["bystander", 0] == words_alone(bystander, 12)
    engine.add(order("later", prompt, SamplingParams(max_tokens=8, seed=seed)))
    run_to_end(engine, transcript, is_overlapped=is_overlapped)
    assert transcript.token_ids["later", 0] == words_alone(prompt, 8, seed=seed)
    assert transcript.num_cached_tokens["later", 0] == 0
    assert rows_of(runner, "later")[0][1] == 0


@both_loops
def test_a_choice_whose_row_fails_takes_no_other_choice_along(is_overlapped: bool) -> None:
    engine, runner = build()
    prompt = prompt_of(21)
    for position in (5, 20):
        name = f"at-{position}"
        runner.faults.add((name, 0, position))
        engine.add(order(name, prompt, SamplingParams(max_tokens=8, n=4, seed=5)))
        transcript = run_to_end(engine, is_overlapped=is_overlapped)
        assert transcript.ends[name, 0] is SequenceEnd.ERROR
        for choice in range(1, 4):
            alone = words_alone(prompt, 8, seed=5, choice=choice)
            assert transcript.token_ids[name, choice] == alone


# --- leaving


@both_loops
def test_no_step_is_spent_on_those_who_left_while_they_waited(is_overlapped: bool) -> None:
    engine, runner = build(max_num_seqs=4)
    transcript = Transcript()
    endless = SamplingParams(max_tokens=60, ignore_eos=True)
    for i in range(4):
        engine.add(order(f"busy-{i}", prompt_of(4, i), endless))
    for i in range(50):
        engine.add(order(f"queued-{i}", prompt_of(12, i), endless))
    for _ in range(3):
        advance(engine, transcript, is_overlapped=is_overlapped)
    for i in range(50):
        engine.cancel(f"queued-{i}")
    for i in range(4):
        engine.cancel(f"busy-{i}")
    engine.add(order("new", prompt_of(5), greedy(3)))
    run_to_end(engine, transcript, is_overlapped=is_overlapped)
    assert all(
        transcript.ends[f"queued-{i}", 0] is SequenceEnd.CANCELLED
        and not rows_of(runner, f"queued-{i}")
        for i in range(50)
    )
    assert transcript.token_ids["new", 0] == words_alone(prompt_of(5), 3)


def test_a_thousand_that_start_and_leave_anywhere_leave_nothing_behind() -> None:
    rng = Random(1)
    schedule = AnySchedule(Sizes(num_blocks=16, num_host_blocks=8))
    for number in range(1000):
        moves: list[Move] = [random_join(rng, number, schedule.sizes)]
        moves.append(Steps(rng.randint(0, 3), is_overlapped=rng.random() < 0.5))
        moves.append(Cancel(number))
        for move in moves:
            schedule.apply(move)
    schedule.finish()
    assert schedule.tally["cancelled"] > 900
    assert not schedule.engine.has_work
