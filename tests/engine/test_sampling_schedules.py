"""Penalties and logprobs of a real, tiny model are the same in any schedule.

The oracle is transformers: its scores of the whole text so far, and the definitions.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.model_runner import ModelRunner
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.interface.token_logprobs import TokenLogprob
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from tests.engine.any_schedule import FixedPredictor
from tests.engine.oracle import write_tiny_llama
from tests.engine.orders import order
from tests.engine.sampling_reference import edited_scores

pytestmark = pytest.mark.usefixtures("one_thread")

PARIS = 77
PROMPT = (PARIS, PARIS, PARIS, 12, 9, 40, 41, 42, 12)
Scores = Callable[[list[int]], NDArray[np.float64]]
Key = tuple[str, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 3, 4]}))
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder, "float32")


@pytest.fixture(scope="module")
def scores_of(folder: Path) -> Scores:
    """The oracle's scores [tokens, vocab] behind every token of a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(token_ids: list[int]) -> NDArray[np.float64]:
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0]
        found: NDArray[np.float64] = logits.double().numpy()
        return found

    return scores


@dataclass
class Story:
    """All that was reported of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    end: SequenceEnd | None = None


def engine_of(
    decoder: Decoder, num_blocks: int = 256, *, num_host_blocks: int = 0, chunk_size: int = 16
) -> Engine:
    """Few blocks and an optimistic predictor make sequences lose their places."""
    settings = EngineSettings(
        block_size=4,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=40,
        chunk_size=chunk_size,
        max_num_seqs=20,
        inter_token_target_s=100.0,
    )
    runner = ModelRunner(decoder, num_blocks, 4, num_host_blocks)
    return Engine(runner, settings, predictor=FixedPredictor("liar"))


def steps(
    engine: Engine, stories: dict[Key, Story], count: int = 10_000, *, is_overlapped: bool = False
) -> dict[Key, Story]:
    for _ in range(count):
        if not engine.has_work:
            break
        for update in engine.step_overlapped() if is_overlapped else engine.step():
            story = stories[update.request_id, update.choice]
            assert story.end is None
            assert update.prompt_logprobs is None or not story.token_ids
            assert update.logprobs is None or len(update.logprobs) == len(update.token_ids)
            story.token_ids += update.token_ids
            story.logprobs += update.logprobs or ()
            story.prompt_logprobs += update.prompt_logprobs or ()
            story.num_cached_tokens = update.num_cached_tokens
            story.end = update.end
        engine.check()
    return stories


def told(engine: Engine, *requests: GenerationRequest, is_overlapped: bool = False) -> list[Story]:
    """What becomes of requests that arrive together, in their order and that of their choices."""
    stories: dict[Key, Story] = defaultdict(Story)
    for request in requests:
        engine.add(request)
    steps(engine, stories, is_overlapped=is_overlapped)
    return [stories[r.request_id, choice] for r in requests for choice in range(r.num_choices)]


def assert_logprobs(
    entries: list[TokenLogprob], scores: NDArray[np.float64], token_ids: list[int], num_top: int
) -> None:
    """Entry i is about token i, judged by the oracle's scores i."""
    expected = torch.from_numpy(scores).log_softmax(dim=-1).numpy()
    assert len(entries) == len(token_ids)
    for entry, row, token_id in zip(entries, expected, token_ids, strict=True):
        assert entry.logprob == pytest.approx(row[token_id], abs=1e-4)
        assert len(set(entry.top_ids)) == num_top
        likeliest = np.sort(row)[::-1][:num_top]
        assert entry.top_logprobs == pytest.approx(likeliest, abs=1e-4)
        assert entry.top_logprobs == pytest.approx(row[list(entry.top_ids)], abs=1e-4)


PENALTIES = [
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, repetition_penalty=1.8),
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, presence_penalty=2.0),
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, frequency_penalty=-1.9),
    SamplingParams(
        max_tokens=16, temperature=0.0, ignore_eos=True, logit_bias=((PARIS, 9.0), (12, -50.0))
    ),
    SamplingParams(
        max_tokens=16,
        temperature=0.0,
        ignore_eos=True,
        repetition_penalty=0.7,
        presence_penalty=1.0,
        frequency_penalty=0.8,
        logit_bias=((9, 2.0),),
    ),
]


def words_by_definition(scores_of: Scores, sampling: SamplingParams) -> list[int]:
    words: list[int] = []
    for _ in range(sampling.max_tokens):
        logits = scores_of([*PROMPT, *words])[-1]
        words.append(int(edited_scores(logits, sampling, PROMPT, words).argmax()))
    return words


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_penalties_count_what_they_say_after_preemption_prefix_hit_and_move(
    decoder: Decoder, scores_of: Scores, is_overlapped: bool
) -> None:
    expected = [words_by_definition(scores_of, sampling) for sampling in PENALTIES]
    plain = words_by_definition(scores_of, SamplingParams(max_tokens=16, temperature=0.0))
    assert len({tuple(words) for words in [plain, *expected]}) == len(PENALTIES) + 1
    orders = [order(str(i), PROMPT, sampling) for i, sampling in enumerate(PENALTIES)]
    # Alone, then once more with the prompt in the cache.
    engine = engine_of(decoder)
    for one, words in zip(orders, expected, strict=True):
        assert told(engine, one, is_overlapped=is_overlapped)[0].token_ids == words
        again = told(engine, one, is_overlapped=is_overlapped)[0]
        assert again.token_ids == words
        assert again.num_cached_tokens == len(PROMPT) - 1
    # All at once, where there is no room for half of them.
    engine = engine_of(decoder, num_blocks=12)
    stories = told(engine, *orders, is_overlapped=is_overlapped)
    assert [story.token_ids for story in stories] == expected
    assert engine.stats().preemptions_total > 0
    # Begun elsewhere.
    moved = [
        replace(one, resumed=(tuple(words[:7]),))
        for one, words in zip(orders, expected, strict=True)
    ]
    stories = told(engine_of(decoder), *moved, is_overlapped=is_overlapped)
    assert [story.token_ids for story in stories] == [words[7:] for words in expected]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_sampled_words_and_logprobs_are_those_of_the_request_alone(
    decoder: Decoder, is_overlapped: bool
) -> None:
    orders = [
        order(
            str(i),
            (*PROMPT[: 3 + i], *range(100, 100 + 3 * i)),
            SamplingParams(
                max_tokens=14,
                temperature=0.9,
                top_p=0.9 if i % 2 else 1.0,
                seed=i,
                n=2,
                ignore_eos=True,
                frequency_penalty=0.5 * (i % 3),
                repetition_penalty=1.2 if i > 3 else 1.0,
                logprobs=i % 4 if i % 2 else None,
                prompt_logprobs=2 if i == 3 else None,
            ),
        )
        for i in range(6)
    ]
    alone = [story for one in orders for story in told(engine_of(decoder), one)]
    engine = engine_of(decoder, num_blocks=24, num_host_blocks=8)
    together = told(engine, *orders, is_overlapped=is_overlapped)
    assert engine.stats().preemptions_total > 2
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert [entry.top_ids for entry in ours] == [entry.top_ids for entry in theirs]
            assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)
    assert [len(story.logprobs) for story in alone] == [0, 0, 14, 14] * 3
    assert alone[2].token_ids != alone[3].token_ids


def test_logprobs_are_the_models_own_whatever_is_done_to_its_scores(
    decoder: Decoder, scores_of: Scores
) -> None:
    sampling = SamplingParams(
        max_tokens=20,
        temperature=0.3,
        top_k=1,
        top_p=0.01,
        presence_penalty=2.0,
        logit_bias=((9, -100.0), (PARIS, 100.0)),
        min_tokens=20,
        logprobs=20,
        prompt_logprobs=5,
    )
    story = told(engine_of(decoder), order("r", PROMPT, sampling))[0]
    scores = scores_of([*PROMPT, *story.token_ids])
    assert story.token_ids == [PARIS] * 20
    assert_logprobs(story.logprobs, scores[len(PROMPT) - 1 : -1], story.token_ids, 20)
    assert_logprobs(story.prompt_logprobs, scores[: len(PROMPT) - 1], list(PROMPT[1:]), 5)
    numbers = [entry.logprob for entry in story.logprobs]
    numbers += [x for entry in story.logprobs for x in entry.top_logprobs]
    assert all(map(math.isfinite, numbers))


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 18, 61])
def test_a_prompt_is_scored_whatever_its_length_and_is_never_found_in_the_cache(
    decoder: Decoder, scores_of: Scores, length: int, max_tokens: int, is_overlapped: bool
) -> None:
    prompt = tuple(5 + 7 * i % 250 for i in range(length))
    engine = engine_of(decoder)
    told(engine, order("before", prompt, SamplingParams(max_tokens=1)))
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, prompt_logprobs=1, n=2, ignore_eos=True
    )
    for story in told(engine, order("r", prompt, sampling), is_overlapped=is_overlapped):
        assert story.end is SequenceEnd.LENGTH
        assert len(story.token_ids) == max_tokens
        assert story.logprobs == []
        assert story.num_cached_tokens == 0
        assert_logprobs(story.prompt_logprobs, scores_of(list(prompt))[:-1], list(prompt[1:]), 1)
    assert engine.stats().late_events_total == 0
    # What was computed for it is there for others.
    again = told(engine, order("after", prompt, SamplingParams(max_tokens=1)))[0]
    assert again.num_cached_tokens == length - 1


def test_choices_that_score_one_prompt_do_not_wait_for_each_others_blocks(
    decoder: Decoder,
) -> None:
    prompt = tuple(5 + 7 * i % 250 for i in range(61))
    num_steps = []
    for n in (1, 2):
        engine = engine_of(decoder)
        told(engine, order("r", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0, n=n)))
        num_steps.append(engine.stats().steps_total)
    assert num_steps == [4, 4]


def test_a_prompt_that_is_only_scored_is_said_to_have_been_served(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    for length in (1, 7):
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
        engine.add(order("r", PROMPT[:length], scoring))
        updates = [update for _ in range(4) for update in engine.step()]
        assert updates[-1].end is SequenceEnd.LENGTH
        assert updates[-1].scheduled_at is not None
        assert not engine.has_work


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("num_steps", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_who_loses_its_place_in_its_prompt_reports_each_logprob_once(
    decoder: Decoder, scores_of: Scores, num_steps: int, max_tokens: int, is_overlapped: bool
) -> None:
    prompt = tuple(5 + 7 * i % 250 for i in range(39))
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, prompt_logprobs=2, logprobs=2, ignore_eos=True
    )
    engine = engine_of(decoder, num_blocks=16, chunk_size=4)
    stories: dict[Key, Story] = defaultdict(Story)
    engine.add(order("scored", prompt, sampling, priority_class=PriorityClass.BATCH))
    steps(engine, stories, num_steps, is_overlapped=is_overlapped)
    for i in range(2):
        urgent = SamplingParams(max_tokens=12, temperature=0.0)
        engine.add(order(f"urgent {i}", prompt[i + 1 :], urgent))
    steps(engine, stories, is_overlapped=is_overlapped)
    assert engine.stats().preemptions_total > 0
    story = stories["scored", 0]
    scores = scores_of([*prompt, *story.token_ids])
    assert story.end is SequenceEnd.LENGTH
    assert_logprobs(story.prompt_logprobs, scores[: len(prompt) - 1], list(prompt[1:]), 2)
    judged = scores[len(prompt) - 1 :][:max_tokens]
    assert_logprobs(story.logprobs, judged, story.token_ids, 2)


def test_a_moved_request_does_not_report_its_prompt_again(decoder: Decoder) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    engine = engine_of(decoder)
    whole = told(engine, order("whole", PROMPT, sampling))[0]
    assert len(whole.prompt_logprobs) == len(PROMPT) - 1
    rest = told(engine, order("rest", PROMPT, sampling, resumed=(tuple(whole.token_ids[:2]),)))[0]
    assert (rest.token_ids, rest.prompt_logprobs) == (whole.token_ids[2:], [])
    assert rest.num_cached_tokens > 0


def test_a_full_context_can_be_scored_and_one_token_less_can_be_continued(
    decoder: Decoder,
) -> None:
    limit = decoder.description.max_position_embeddings
    prompt = tuple(5 + 7 * i % 250 for i in range(limit))
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    story = told(engine_of(decoder), order("full", prompt, scoring))[0]
    assert len(story.prompt_logprobs) == limit - 1
    one = replace(scoring, max_tokens=1)
    story = told(engine_of(decoder), order("nearly", prompt[:-1], one))[0]
    assert (len(story.prompt_logprobs), len(story.token_ids)) == (limit - 2, 1)


def test_no_end_token_of_the_model_comes_before_min_tokens(decoder: Decoder) -> None:
    eager = ((2, 60.0), (3, 70.0), (4, 80.0), (5, 50.0))
    sampling = SamplingParams(max_tokens=20, temperature=0.0, logit_bias=eager, min_tokens=10)
    engine = engine_of(decoder)
    story = told(engine, order("a", PROMPT, sampling))[0]
    assert (story.token_ids, story.end) == ([5] * 10 + [4], SequenceEnd.STOP)
    stopping = replace(sampling, ignore_eos=True, stop_token_ids=(4,), min_tokens=3)
    story = told(engine, order("b", PROMPT, stopping))[0]
    assert (story.token_ids, story.end) == ([3] * 3 + [4], SequenceEnd.STOP)
    ignoring = replace(sampling, ignore_eos=True, min_tokens=0)
    story = told(engine, order("c", PROMPT, ignoring))[0]
    assert (story.token_ids, story.end) == ([4] * 20, SequenceEnd.LENGTH)
