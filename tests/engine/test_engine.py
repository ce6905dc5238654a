import pytest

from engine.engine import Engine, EngineSettings
from engine.interface.errors import DuplicateRequest, InvalidRequest, QueueFull
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.hash_runner import EOS, HashRunner, next_token, words_alone
from tests.engine.orders import Transcript, greedy, order, run_to_end

ENDLESS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def build(
    clock: Clock | None = None, wall: Clock | None = None, *, num_blocks: int = 32, waiting: int = 8
) -> Engine:
    clock = clock or Clock()
    settings = EngineSettings(
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=16,
        chunk_size=8,
        max_num_seqs=4,
        max_waiting=waiting,
    )
    runner = HashRunner(num_blocks, 4)
    return Engine(runner, settings, clock=wall or clock, monotonic=clock)


def test_a_cancelled_sequence_frees_its_blocks_in_the_same_step() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), ENDLESS))
    engine.step()
    assert engine.stats().kv_blocks_free < 32
    engine.cancel("a")
    assert engine.stats().kv_blocks_free == 32
    engine.check()
    assert [update.end for update in engine.step()] == [SequenceEnd.CANCELLED]
    assert not engine.has_work


def test_one_choice_can_be_cancelled_alone() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), SamplingParams(max_tokens=9, n=3, ignore_eos=True)))
    engine.step()
    engine.cancel("a", 1)
    transcript = run_to_end(engine)
    assert transcript.ends == {
        ("a", 0): SequenceEnd.LENGTH,
        ("a", 1): SequenceEnd.CANCELLED,
        ("a", 2): SequenceEnd.LENGTH,
    }


def test_cancelling_a_waiting_request_costs_no_step() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), ENDLESS))
    engine.cancel("a")
    assert [update.end for update in engine.step()] == [SequenceEnd.CANCELLED]
    assert engine.stats().steps_total == 0


def test_late_cancels_are_counted_and_otherwise_ignored() -> None:
    engine = build()
    engine.cancel("never-seen")
    engine.add(order("a", (1,), greedy(1)))
    run_to_end(engine)
    engine.cancel("a")
    engine.cancel("a", 3)
    assert engine.stats().late_cancels_total == 3
    assert not engine.has_work


def test_a_request_past_its_deadline_ends_running_or_waiting() -> None:
    clock = Clock()
    engine = build(clock)
    for i in range(5):
        engine.add(order(str(i), (1, 2), ENDLESS, deadline_at=102.0))
    engine.step()
    clock.now = 102.0
    updates = engine.step()
    assert [update.end for update in updates] == [SequenceEnd.DEADLINE] * 5
    assert [update.scheduled_at for update in updates] == [100.0] * 4 + [None]
    assert engine.stats().kv_blocks_free == 32


def test_a_jump_of_the_wall_clock_ends_nothing() -> None:
    wall = Clock()
    engine = build(Clock(), wall)
    engine.add(order("a", (1, 2), ENDLESS, deadline_at=110.0))
    engine.step()
    wall.now += 3600
    transcript = run_to_end(engine)
    assert transcript.ends["a", 0] is SequenceEnd.LENGTH


def test_a_resumed_request_says_the_rest_and_only_the_rest() -> None:
    whole = words_alone((1, 2, 3), 12, seed=4)
    sampling = SamplingParams(max_tokens=12, seed=4)
    assert len(whole) > 6
    for num_resumed in range(len(whole) + 1):
        engine = build()
        engine.add(order("a", (1, 2, 3), sampling, resumed=(tuple(whole[:num_resumed]),)))
        transcript = run_to_end(engine)
        assert transcript.token_ids["a", 0] == whole[num_resumed:]
        assert len(transcript.ends) == 1


def test_a_request_resumed_at_its_end_computes_nothing() -> None:
    engine = build()
    engine.add(order("full", (1,), greedy(2), resumed=((5, 6),)))
    engine.add(order("stopped", (1,), greedy(9), resumed=((5, EOS),)))
    updates = engine.step()
    assert [update.end for update in updates] == [SequenceEnd.LENGTH, SequenceEnd.STOP]
    assert engine.stats().steps_total == 0


def test_an_end_token_ends_and_is_reported_unless_ignored() -> None:
    prompt = next(
        (i, j) for i in range(1, 50) for j in range(1, 50) if next_token([i, j], 0, 0) == EOS
    )
    engine = build()
    engine.add(order("stops", prompt, greedy(5)))
    engine.add(order("goes-on", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    transcript = run_to_end(engine)
    assert transcript.token_ids["stops", 0] == [EOS]
    assert transcript.ends["stops", 0] is SequenceEnd.STOP
    assert len(transcript.token_ids["goes-on", 0]) == 5


def test_a_stop_token_id_ends_the_output() -> None:
    words = words_alone((7, 7), 8)
    engine = build()
    engine.add(order("a", (7, 7), SamplingParams(max_tokens=8, stop_token_ids=(words[2],))))
    transcript = run_to_end(engine)
    assert transcript.token_ids["a", 0] == words[: words.index(words[2]) + 1]
    assert transcript.ends["a", 0] is SequenceEnd.STOP


def test_choices_are_numbered_over_prompts_and_n() -> None:
    engine = build()
    engine.add(
        GenerationRequest(
            request_id="a",
            prompts=((1, 2), (3, 4, 5)),
            sampling=SamplingParams(max_tokens=4, n=2, seed=9),
            priority_class=PriorityClass.INTERACTIVE,
            cache_scope="scope",
            arrival=0.0,
            deadline_at=1e12,
        )
    )
    transcript = run_to_end(engine)
    for choice, prompt in enumerate([(1, 2), (1, 2), (3, 4, 5), (3, 4, 5)]):
        expected = words_alone(prompt, 4, seed=9, choice=choice)
        assert transcript.token_ids["a", choice] == expected


def test_a_request_that_can_never_fit_is_refused_at_once_and_fails_alone() -> None:
    engine = build(num_blocks=4)
    engine.add(order("small", (1,), greedy(3)))
    with pytest.raises(InvalidRequest, match="KV cache here holds 16") as caught:
        engine.add(order("large", (1,) * 10, greedy(7)))
    assert caught.value.code == "context_length_exceeded"
    assert list(run_to_end(engine).ends) == [("small", 0)]


@pytest.mark.parametrize(
    ("prompt", "resumed"),
    [((50,), ()), ((-1,), ()), ((), ()), ((1,), ((50,),)), ((1,), ((1,) * 9,))],
)
def test_tokens_outside_the_model_are_refused(
    prompt: tuple[int, ...], resumed: tuple[tuple[int, ...], ...]
) -> None:
    engine = build()
    with pytest.raises(InvalidRequest):
        engine.add(order("a", prompt, greedy(8), resumed=resumed))
    assert not engine.has_work


def test_a_request_beyond_the_waiting_limit_is_refused_whole() -> None:
    engine = build(waiting=4)
    engine.add(order("a", (1,), SamplingParams(max_tokens=2, n=3)))
    with pytest.raises(QueueFull):
        engine.add(order("b", (1,), SamplingParams(max_tokens=2, n=2)))
    assert {key[0] for key in run_to_end(engine).ends} == {"a"}


def test_a_second_request_with_a_living_id_changes_nothing() -> None:
    engine = build()
    engine.add(order("a", (1, 2), greedy(5)))
    with pytest.raises(DuplicateRequest):
        engine.add(order("a", (3, 4), greedy(5)))
    transcript = Transcript()
    run_to_end(engine, transcript)
    assert transcript.token_ids["a", 0] == words_alone((1, 2), 5)


def test_a_thousand_cancelled_requests_leave_nothing_behind() -> None:
    engine = build()
    for i in range(1000):
        engine.add(order(str(i), (1, 2, 3) * (1 + i % 5), ENDLESS))
        for _ in range(i % 4):
            engine.step()
        engine.cancel(str(i))
    engine.step()
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_free) == (0, 0, 32)
    assert not engine.has_work
