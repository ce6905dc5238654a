from threading import Thread

import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import InlineExecution
from engine.interface.errors import DuplicateRequest, InvalidRequest, QueueFull
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.scheduling.sequence import Sequence
from engine.step_watchdog import StallKind
from tests.engine.hash_runner import EOS, HashRunner, next_token, words_alone
from tests.engine.orders import Transcript, greedy, order, run_to_end

ENDLESS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ClosingExecution(InlineExecution):
    """Remembers that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        super().close()


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
    assert engine.stats().late_events_total == 3
    assert not engine.has_work


def test_a_result_for_a_sequence_that_left_meanwhile_is_counted_and_otherwise_ignored() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), ENDLESS))
    engine.add(order("b", (4, 5), ENDLESS))
    transcript = Transcript()
    for _ in range(3):
        transcript.note(engine.step_overlapped())
    engine.cancel("a")
    num_said = len(transcript.token_ids["a", 0])
    run_to_end(engine, transcript, is_overlapped=True)
    assert len(transcript.token_ids["a", 0]) == num_said
    assert transcript.ends["a", 0] is SequenceEnd.CANCELLED
    # The row of "a" in the step that was in flight when it left.
    assert engine.stats().late_events_total == 1


def test_a_request_past_its_deadline_ends_running_or_waiting() -> None:
    clock = Clock()
    engine = build(clock, num_blocks=64)
    for i in range(5):
        engine.add(order(str(i), (1 + i, 2), ENDLESS, deadline_at=102.0))
    engine.step()
    clock.now = 102.0
    updates = engine.step()
    assert [update.end for update in updates] == [SequenceEnd.DEADLINE] * 5
    assert [update.scheduled_at for update in updates] == [100.0] * 4 + [None]
    assert engine.stats().kv_blocks_free == 64


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


def test_the_overlapped_loop_says_the_same_in_the_same_order() -> None:
    told: list[dict[tuple[str, int], list[SequenceUpdate]]] = []
    for is_overlapped in (False, True):
        engine = build(waiting=9)
        for i in range(6):
            sampling = SamplingParams(max_tokens=6 + i, seed=i, n=1 + i % 2)
            engine.add(order(str(i), (1 + i, 2, 3, 4, 5, 6, 7), sampling))
        updates: dict[tuple[str, int], list[SequenceUpdate]] = {}
        while engine.has_work:
            for update in engine.step_overlapped() if is_overlapped else engine.step():
                updates.setdefault((update.request_id, update.choice), []).append(update)
            engine.check()
        told.append(updates)
    assert told[0] == told[1]
    assert len(told[0]) == 9


def test_the_loops_may_be_changed_in_mid_course() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), SamplingParams(max_tokens=12, seed=4)))
    transcript = Transcript()
    for i in range(20):
        transcript.note(engine.step_overlapped() if i % 3 else engine.step())
    run_to_end(engine, transcript)
    assert transcript.token_ids["a", 0] == words_alone((1, 2, 3), 12, seed=4)


def test_the_next_step_is_decided_while_the_one_before_is_in_flight() -> None:
    engine = build()
    engine.add(order("a", (1, 2, 3), ENDLESS))
    assert engine.step_overlapped() == []
    assert engine.stats().steps_total == 0
    first = engine.step_overlapped()
    assert engine.stats().steps_total == 1
    assert [len(update.token_ids) for update in first] == [1]
    assert engine.has_work


def test_a_request_prepared_on_another_thread_is_added_as_it_is() -> None:
    engine = build()
    request = order("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=6, n=2, seed=1))
    prepared: list[list[Sequence]] = []
    busy = order("busy", (9,), ENDLESS)
    engine.add(busy)
    thread = Thread(target=lambda: prepared.append(engine.prepare(request)))
    thread.start()
    for _ in range(5):
        engine.step()
    thread.join()
    before = engine.stats()
    assert (before.running, before.waiting) == (1, 0), "to prepare changes nothing"
    engine.add(request, prepared[0])
    transcript = run_to_end(engine)
    for choice in range(2):
        expected = words_alone((1, 2, 3, 4, 5), 6, seed=1, choice=choice)
        assert transcript.token_ids["a", choice] == expected


def test_a_request_that_cannot_run_here_is_refused_when_it_is_prepared() -> None:
    engine = build()
    with pytest.raises(InvalidRequest):
        engine.prepare(order("a", (999,), greedy(3)))


def test_what_is_known_of_the_cache_is_told() -> None:
    engine = build()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    engine.add(order("a", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.max_num_seqs) == (1, 0, 4)
    assert stats.kv_blocks_total - stats.kv_blocks_free == 2
    run_to_end(engine)
    engine.add(order("b", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    transcript = run_to_end(engine)
    assert engine.stats().cached_tokens_total == transcript.num_cached_tokens["b", 0] == 8
    assert engine.stats().projected_free_tokens == 32 * 4
    assert engine.stats().host_blocks_free == 0


def test_expected_tokens_count_every_choice_with_its_prompt() -> None:
    engine = build()
    sampling = SamplingParams(max_tokens=7, n=3)
    expected = engine.expected_tokens(order("a", (1,) * 5, sampling))
    assert 3 * 5 < expected <= 3 * (5 + 7)


def test_an_engine_that_hangs_in_a_step_says_so_to_other_threads() -> None:
    clock = Clock()
    engine = build(clock)
    engine.add(order("a", (1, 2), ENDLESS))
    engine.step_overlapped()
    assert engine.verdict() is None
    clock.now += 1000.0
    verdict = engine.verdict()
    assert verdict is not None
    assert verdict.kind is StallKind.STEP_OVERDUE
    engine.step_overlapped()
    assert engine.verdict() is None
    assert engine.stats().stalls_total == 1


def test_closing_the_engine_closes_where_it_computes() -> None:
    execution = ClosingExecution(HashRunner(8, 4))
    engine = Engine(
        HashRunner(8, 4), EngineSettings(block_size=4, num_blocks=8), execution=execution
    )
    engine.close()
    assert execution.is_closed


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


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_length_is_learned_from_a_cancel_that_says_nothing_more_is_wanted(
    is_complete: bool,
) -> None:
    seen: list[tuple[str, int, bool]] = []

    class Notes:
        def expected_output(self, cache_scope: str, num_output_tokens: int, max_tokens: int) -> int:
            return max_tokens

        def observe(self, cache_scope: str, num_output_tokens: int, is_complete: bool) -> None:
            seen.append((cache_scope, num_output_tokens, is_complete))

    engine = Engine(
        HashRunner(16, 4), EngineSettings(block_size=4, num_blocks=16), predictor=Notes()
    )
    engine.add(order("a", (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.cancel("a", 0, is_complete=is_complete)
    assert seen == [("scope", 2, is_complete)]
