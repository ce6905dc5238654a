import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.model_runner_output import NO_TOKEN
from engine.execution.sampler import SampledRows, Sampler
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 3001
EOS = 5


class Wish(NamedTuple):
    """A sequence, and the position at which its next token will stand."""

    spec: SequenceSpec
    position: int


def wish(sampling: SamplingParams, *, choice: int = 0, position: int = 10) -> Wish:
    """A sequence whose prompt had 8 tokens."""
    return Wish(SequenceSpec("r", choice, 8, sampling), position)


def scores(rows: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: Tensor, wishes: list[Wish]) -> list[int]:
    positions = np.array([a_wish.position for a_wish in wishes])
    specs = [a_wish.spec for a_wish in wishes]
    rows = SampledRows(specs, np.arange(len(specs)), positions)
    tokens, _ = Sampler(frozenset({EOS})).sample(logits, rows)
    words: list[int] = tokens.tolist()
    return words


def draws(logits: Tensor, sampling: SamplingParams, count: int) -> list[int]:
    """The same scores drawn from at many positions."""
    wishes = [wish(sampling, position=8 + i) for i in range(count)]
    return draw(logits.expand(count, -1), wishes)


def some_params(chooser: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=9,
        temperature=chooser.choice([0.0, 0.3, 1.0, 2.0]),
        top_p=chooser.choice([1.0, 0.9, 0.3, 0.99999]),
        top_k=chooser.choice([0, 1, 5, 2000]),
        min_p=chooser.choice([0.0, 0.1]),
        min_tokens=chooser.choice([0, 9]),
        seed=chooser.randrange(2**63),
    )


def test_a_rows_token_does_not_depend_on_its_company_or_place() -> None:
    chooser = random.Random(3)
    wishes = [wish(some_params(chooser), choice=i % 3) for i in range(40)]
    logits = scores(40)
    alone = [draw(logits[i : i + 1], [wishes[i]])[0] for i in range(40)]
    assert draw(logits, wishes) == alone
    for _ in range(5):
        order = chooser.sample(range(40), chooser.randrange(2, 40))
        together = draw(logits[order], [wishes[i] for i in order])
        assert together == [alone[i] for i in order]


def test_equal_seeds_give_equal_tokens_and_other_names_others() -> None:
    sampling = SamplingParams(max_tokens=9, seed=2**62 + 1)
    flat = torch.zeros(1, VOCAB_SIZE)
    first = draw(flat, [wish(sampling)])
    assert draw(flat, [wish(sampling)]) == first
    others = [
        wish(SamplingParams(max_tokens=9, seed=1)),
        wish(SamplingParams(max_tokens=9, seed=2**62 + 1 + 2**32)),
        wish(sampling, choice=1),
        wish(sampling, position=11),
    ]
    tokens = [draw(flat, [other])[0] for other in others]
    assert len({*tokens, *first}) == 5


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-4, 9e-4])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    logits = scores(6)
    wishes = [wish(SamplingParams(max_tokens=9, temperature=temperature, seed=i)) for i in range(6)]
    assert draw(logits, wishes) == logits.argmax(-1).tolist()


def test_top_k_of_one_is_greedy_even_among_equals() -> None:
    logits = scores(6).round()
    wishes = [wish(SamplingParams(max_tokens=9, top_k=1, seed=i)) for i in range(6)]
    assert draw(logits, wishes) == logits.argmax(-1).tolist()


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.full((1, 211), -1e9)
    logits[0, 100:105] = probabilities.log() * 0.7
    count = 20_000
    tokens = torch.tensor(draws(logits, SamplingParams(max_tokens=9, temperature=0.7), count))
    seen = torch.bincount(tokens - 100, minlength=5) / count
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    assert bool(((seen - probabilities).abs() < 4.5 * deviation).all()), seen


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(max_tokens=9, top_k=3), {10, 11, 12}),
        (SamplingParams(max_tokens=9, top_p=0.6), {10, 11}),
        (SamplingParams(max_tokens=9, top_p=0.4), {10}),
        (SamplingParams(max_tokens=9, min_p=0.35), {10, 11, 12}),
        # Renormalised after top_k: 0.4 / 0.7 < 0.6, so two tokens are needed.
        (SamplingParams(max_tokens=9, top_k=2, top_p=0.6), {10, 11}),
        (SamplingParams(max_tokens=9, top_k=2, top_p=0.5), {10}),
        (SamplingParams(max_tokens=9, top_k=4, min_p=0.6), {10, 11}),
    ],
)
def test_filters_keep_what_they_say(sampling: SamplingParams, expected: set[int]) -> None:
    logits = torch.full((1, VOCAB_SIZE), -1e9)
    logits[0, 10:14] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(logits, sampling, 200)) == expected


def test_a_nucleus_beyond_the_usual_head_is_found_by_sorting_all() -> None:
    flat = torch.arange(VOCAB_SIZE) * -1e-4
    sampling = SamplingParams(max_tokens=9, top_p=0.7)
    mass = flat.softmax(-1).cumsum(-1)
    num_kept = int((mass < 0.7).sum()) + 1
    tokens = draws(flat[None], sampling, 600)
    assert 1024 < max(tokens) < num_kept
    assert max(tokens) > num_kept - 50


def test_end_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS], logits[0, 77], logits[0, 99] = 50.0, 40.0, 30.0
    sampling = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(77,))
    tokens = [draw(logits, [wish(sampling, position=8 + i)])[0] for i in range(3)]
    assert tokens == [99, 99, EOS]
    ignoring = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, ignore_eos=True)
    assert draw(logits, [wish(ignoring, position=8)]) == [EOS]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_scores_fails_alone(poison: float, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=temperature, top_p=0.9)
    logits = scores(3)
    healthy = draw(logits, [wish(sampling)] * 3)
    logits[1, 17] = poison
    assert draw(logits, [wish(sampling)] * 3) == [healthy[0], NO_TOKEN, healthy[2]]
    logits[1] = float("-inf")
    assert draw(logits, [wish(sampling)] * 3) == [healthy[0], NO_TOKEN, healthy[2]]
