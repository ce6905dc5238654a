"""From sampled tokens to words: what is delivered, held back, wasted and finally settled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.metering.settlement import ChoiceOutput
from control.streams.messages import Assignment
from engine.interface.generation_delta import FinishReason, GenerationDelta
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.interface.text_options import TextOptions
from engine.interface.token_logprobs import TokenLogprob
from engine.text.tokenizer import Tokenizer
from workers.delivery import Delivery
from workers.request_times import Received
from workers.scripted_model import EOS_TOKEN_ID, make_scripted_model

NOTHING_SPECIAL = TextOptions()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_scripted_model(tmp_path_factory.mktemp("weights")))


def begin(
    tokenizer: Tokenizer,
    *,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    n: int = 1,
    priority_class: PriorityClass = PriorityClass.INTERACTIVE,
    log: tuple[GenerationDelta, ...] = (),
    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3),),
    is_scored: bool = False,
    text: TextOptions = NOTHING_SPECIAL,
) -> Delivery:
    num_top = 1 if is_scored else None
    sampling = SamplingParams(
        max_tokens=100,
        stop=stop,
        min_tokens=min_tokens,
        n=n,
        logprobs=num_top,
        prompt_logprobs=num_top,
    )
    request = GenerationRequest(
        "r" * 26, prompts, sampling, priority_class, "scope", 0.0, 60.0, text=text
    )
    return Delivery(Assignment("r" * 26, 1, "d", request), tokenizer, log, Received(0.5, 100.0))


def say(
    delivery: Delivery, data: bytes, end: SequenceEnd | None = None, choice: int = 0
) -> list[GenerationDelta]:
    """One update for each byte, the last one with the end."""
    deltas = []
    for number, byte in enumerate(data, 1):
        is_last = end if number == len(data) else None
        update = SequenceUpdate("r" * 26, choice, (byte,), is_last, scheduled_at=101.0)
        deltas.append(delivery.take(update, 102.0 + number))
    return [delta for delta in deltas if delta is not None]


def text_of(deltas: list[GenerationDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    deltas = say(begin(tokenizer), "aé世".encode(), SequenceEnd.LENGTH)
    assert [delta.text for delta in deltas] == ["a", "", "é", "", "", "世"]
    assert [delta.offset for delta in deltas] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("end", [SequenceEnd.STOP, SequenceEnd.LENGTH, SequenceEnd.DEADLINE])
def test_text_held_back_for_a_stop_string_arrives_before_the_end(
    tokenizer: Tokenizer, end: SequenceEnd
) -> None:
    delivery = begin(tokenizer, stop=("STOP",))
    last = bytes([32]) if end is SequenceEnd.STOP else b""  # stands for a stop token: not shown
    assert text_of(say(delivery, b"say STO" + last, end)) == "say STO"
    assert delivery.is_over


def test_tokens_beyond_a_stop_string_are_waste(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer, stop=("STOP",))
    deltas = say(delivery, b"a STOP and more")
    assert text_of(deltas) == "a "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert delivery.finished_choices == (0,)
    assert not delivery.is_over
    cancelled = SequenceUpdate("r" * 26, 0, (), SequenceEnd.CANCELLED)
    assert delivery.take(cancelled, 200.0) is None
    settlement = delivery.settlement("replica")
    assert (settlement.usage.completion_tokens, settlement.wasted_tokens) == (6, 9)
    assert settlement.error is None


def test_stop_strings_count_only_after_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    deltas = say(begin(tokenizer, stop=("x",), min_tokens=3), b"xxxxx")
    assert text_of(deltas) == "xxx"


def test_a_request_is_over_when_all_its_choices_are(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer, n=2)
    say(delivery, b"ab", SequenceEnd.STOP, choice=1)
    assert not delivery.is_over
    say(delivery, b"cd", SequenceEnd.LENGTH, choice=0)
    assert delivery.is_over
    settlement = delivery.settlement("replica")
    assert settlement.finish_reasons == (FinishReason.LENGTH, FinishReason.STOP)
    assert settlement.usage.completion_tokens == 4
    assert settlement.usage.prompt_tokens == 3


def test_nothing_is_charged_for_a_request_that_was_never_computed(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer)
    delivery.take(SequenceUpdate("r" * 26, 0, (), SequenceEnd.CANCELLED), 1.0)
    settlement = delivery.settlement("replica")
    assert (settlement.usage.prompt_tokens, settlement.usage.completion_tokens) == (0, 0)
    assert settlement.outcome == "cancelled"


def end(choice: int, num_cached: int, scheduled_at: float | None) -> SequenceUpdate:
    """A choice's one and last word."""
    if scheduled_at is None:
        return SequenceUpdate("r" * 26, choice, (), SequenceEnd.CANCELLED, num_cached)
    return SequenceUpdate("r" * 26, choice, (7,), SequenceEnd.LENGTH, num_cached, scheduled_at)


def test_a_prompts_hit_is_that_of_the_choice_that_was_computed_first(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer, n=3, prompts=((1, 2, 3), (1, 2, 3, 4)))
    # Prompt 0: choice 1 was the first, choice 0 and 2 found what it had computed. Prompt 1: two
    # began in one step, so the one that comes first did.
    for choice, num_cached, scheduled_at in [
        (0, 2, 9.0), (1, 0, 8.0), (2, 2, 9.0), (5, 3, 8.0), (3, 1, 8.0), (4, 3, 9.0)
    ]:  # fmt: skip
        delivery.take(end(choice, num_cached, scheduled_at), 10.0)
    usage = delivery.settlement("replica").usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (7, 0 + 1)


def test_a_hit_of_a_choice_that_was_never_computed_does_not_count(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer)
    delivery.take(end(0, 2, None), 1.0)
    usage = delivery.settlement("replica").usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (0, 0)


def test_times_say_where_a_request_spent_them(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer)
    say(delivery, b"abc", SequenceEnd.STOP)
    timings = delivery.settlement("replica").timings
    assert (timings.queue_s, timings.wait_s) == (0.5, 1.0)
    assert (timings.prefill_s, timings.decode_s) == (2.0, 2.0)
    assert (timings.inter_token_p50_s, timings.inter_token_max_s) == (1.0, 1.0)


def test_only_batch_outputs_are_kept(tokenizer: Tokenizer) -> None:
    interactive = begin(tokenizer)
    batch = begin(tokenizer, priority_class=PriorityClass.BATCH, stop=("!",))
    for delivery in (interactive, batch):
        say(delivery, b"hi!?", SequenceEnd.LENGTH)
    assert interactive.settlement("replica").outputs == ()
    kept = ChoiceOutput(0, tuple(b"hi!"), "hi", FinishReason.STOP)
    assert batch.settlement("replica").outputs == (kept,)


words = st.text(st.sampled_from("abSTOP é世"), min_size=1, max_size=25).map(str.encode)


@given(words, st.integers(0, 100), st.sampled_from([(), ("STOP",), ("b", "OP")]))
def test_an_attempt_that_takes_over_anywhere_says_the_same(
    tokenizer: Tokenizer, data: bytes, cut: int, stop: tuple[str, ...]
) -> None:
    alone = say(begin(tokenizer, stop=stop), data, SequenceEnd.LENGTH)
    cut = min(cut, len(data) - 1)
    first = say(begin(tokenizer, stop=stop), data[:cut])
    second_attempt = begin(tokenizer, stop=stop, log=tuple(first))
    resumed = second_attempt.resumed_request().resumed
    delivered = resumed[0] if resumed else ()
    second = say(second_attempt, data[len(delivered) :], SequenceEnd.LENGTH)
    both = first + second
    assert text_of(both) == text_of(alone)
    assert [d.serial for d in both] == list(range(len(both)))
    assert [t for d in both for t in d.token_ids] == [t for d in alone for t in d.token_ids]
    reasons = [d.finish_reason for d in both if d.finish_reason]
    assert reasons == [d.finish_reason for d in alone if d.finish_reason]


def test_the_end_of_sequence_token_is_billed_and_not_said(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer)
    delivery.take(SequenceUpdate("r" * 26, 0, (104,), None), 1.0)
    delta = delivery.take(SequenceUpdate("r" * 26, 0, (EOS_TOKEN_ID,), SequenceEnd.STOP), 2.0)
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("", (EOS_TOKEN_ID,))
    assert delivery.settlement("replica").usage.completion_tokens == 2


def scored(
    delivery: Delivery, data: bytes, end: SequenceEnd | None = None
) -> list[GenerationDelta]:
    """As `say`, each token with a logprob that tells its place, the prompt's two before them."""
    deltas = []
    num_resumed = sum(map(len, delivery.resumed_request().resumed))
    for place in () if num_resumed else (-101.0, -102.0):
        scores = (TokenLogprob(place),)
        update = SequenceUpdate("r" * 26, 0, (), scheduled_at=101.0, prompt_logprobs=scores)
        deltas.append(delivery.take(update, 101.0))
    for number, byte in enumerate(data, 1):
        update = SequenceUpdate(
            "r" * 26,
            0,
            (byte,),
            end if number == len(data) else None,
            scheduled_at=101.0,
            logprobs=(TokenLogprob(-float(num_resumed + number)),),
        )
        deltas.append(delivery.take(update, 102.0))
    return [delta for delta in deltas if delta is not None]


@given(words, st.integers(0, 100), st.sampled_from([(), ("STOP",), ("b", "OP")]))
def test_every_delivered_token_has_its_logprob_once_whoever_delivers_it(
    tokenizer: Tokenizer, data: bytes, cut: int, stop: tuple[str, ...]
) -> None:
    cut = min(cut, len(data) - 1)
    first = scored(begin(tokenizer, stop=stop, is_scored=True), data[:cut])
    batch = PriorityClass.BATCH
    taker = begin(tokenizer, stop=stop, is_scored=True, log=tuple(first), priority_class=batch)
    num_delivered = sum(len(delta.token_ids) for delta in first)
    both = first + scored(taker, data[num_delivered:], SequenceEnd.LENGTH)
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in both)
    places = [entry.logprob for delta in both for entry in delta.logprobs or ()]
    assert places == [-float(n) for n in range(1, len(places) + 1)]
    assert [delta.prompt_logprobs for delta in both if delta.prompt_logprobs is not None] == [
        (TokenLogprob(-101.0), TokenLogprob(-102.0))
    ]
    assert both[0].prompt_logprobs is not None
    if taker.is_over and taker.finished_choices:
        (kept,) = taker.settlement("replica").outputs
        assert kept.scores.logprobs == tuple(map(TokenLogprob, places))
        assert kept.scores.prompt_logprobs == both[0].prompt_logprobs
        assert kept.text == text_of(both)


def test_a_prompt_that_is_only_scored_ends_at_its_length(tokenizer: Tokenizer) -> None:
    delivery = begin(tokenizer, is_scored=True)
    scores = (TokenLogprob(-1.0), TokenLogprob(-2.0))
    update = SequenceUpdate(
        "r" * 26, 0, (), SequenceEnd.LENGTH, scheduled_at=1.0, prompt_logprobs=scores
    )
    delta = delivery.take(update, 2.0)
    assert delta is not None
    assert (delta.finish_reason, delta.prompt_logprobs) == (FinishReason.LENGTH, scores)
    again = begin(tokenizer, is_scored=True, log=(delta,))
    assert again.take(update, 3.0) is None
    usage = delivery.settlement("replica").usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 0)


def test_what_ended_the_output_is_shown_only_on_request(tokenizer: Tokenizer) -> None:
    for shows_stop in (False, True):
        options = TextOptions(shows_stop=shows_stop)
        by_string = begin(tokenizer, stop=("STOP",), text=options)
        assert text_of(say(by_string, b"a STOP b")) == ("a STOP" if shows_stop else "a ")
        by_token = begin(tokenizer, text=options)
        shown = text_of(say(by_token, b"ab!", SequenceEnd.STOP))
        assert shown == ("ab!" if shows_stop else "ab")
