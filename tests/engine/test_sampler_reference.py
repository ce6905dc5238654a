"""The batch sampler against its meaning: token by token, and as a distribution."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.execution.sampler import SampledRows, Sampler
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SequenceSpec
from tests.engine.sampling_reference import Floats, kept_probabilities, reference_token

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 1500
EOS = frozenset({5, 6, 7})


def some_params(chooser: random.Random) -> SamplingParams:
    """Most rows are plain, some have anything."""
    plain = SamplingParams(
        max_tokens=99,
        temperature=chooser.choice([0.0, 0.7, 1.0, 1.0]),
        top_p=chooser.choice([1.0, 0.95]),
        seed=chooser.randrange(2**63),
    )
    if chooser.random() < 0.4:
        return plain
    return SamplingParams(
        max_tokens=99,
        temperature=chooser.choice([0.0, 0.3, 1.0, 2.0]),
        top_p=chooser.choice([1.0, 0.9, 0.3, 0.99999]),
        top_k=chooser.choice([-1, 0, 1, 5, 90, 1100, VOCAB_SIZE, 10**9]),
        min_p=chooser.choice([0.0, 0.0, 0.1]),
        min_tokens=chooser.choice([0, 30]),
        stop_token_ids=chooser.choice([(), (8, 9)]),
        ignore_eos=chooser.random() < 0.3,
        seed=chooser.randrange(2**63),
        presence_penalty=chooser.choice([0.0, 1.5, -0.7]),
        frequency_penalty=chooser.choice([0.0, 0.8, -0.3]),
        repetition_penalty=chooser.choice([1.0, 1.3, 0.8]),
        logit_bias=chooser.choice([(), ((3, 4.0), (17, -100.0), (400, 2.5))]),
        logprobs=chooser.choice([None, 0, 3]),
    )


class Crowd:
    """Rows of all kinds, each with its scores and all that it has said, and what it must say."""

    def __init__(self, size: int, seed: int) -> None:
        chooser = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(size, VOCAB_SIZE, generator=generator) * 3
        # What was said is likely to be said again, so that penalties matter.
        self.specs, self.histories = [], []
        for row in range(size):
            num_prompt = chooser.randrange(1, 40)
            likely = self.logits[row].topk(30).indices.tolist()
            self.specs.append(SequenceSpec(str(row), row % 3, num_prompt, some_params(chooser)))
            self.histories.append(
                [chooser.choice([*likely, *EOS]) for _ in range(num_prompt + row % 25)]
            )
        self.expected = [
            reference_token(logits, spec, history, EOS)
            for logits, spec, history in zip(
                self.logits.double().numpy(), self.specs, self.histories, strict=True
            )
        ]

    def drawn(self, sampler: Sampler, order: list[int], slots: list[int]) -> list[int]:
        histories = {
            place: np.array(self.histories[row])
            for place, row in enumerate(order)
            if self.specs[row].sampling.needs_history
        }
        rows = SampledRows(
            [self.specs[row] for row in order],
            np.array(slots),
            np.array([len(self.histories[row]) for row in order]),
            histories,
        )
        tokens: list[int] = sampler.sample(self.logits[order], rows)[0].tolist()
        return tokens


def test_every_row_says_what_its_settings_mean_in_any_company_and_place() -> None:
    crowd, chooser, sampler = Crowd(120, seed=1), random.Random(2), Sampler(EOS)
    assert len({*crowd.expected}) > 60
    before = crowd.logits.clone()
    assert crowd.drawn(sampler, list(range(120)), list(range(120))) == crowd.expected
    for size in (1, 1, 1, 2, 7, 30, 60, 119):
        order = chooser.sample(range(120), size)
        # Other sequences had these slots before.
        drawn = crowd.drawn(sampler, order, chooser.sample(range(200), size))
        assert drawn == [crowd.expected[row] for row in order]
    assert torch.equal(crowd.logits, before)


def test_penalties_and_bias_are_what_makes_the_difference() -> None:
    """The crowd above would prove little if nobody minded losing them."""
    crowd = Crowd(120, seed=1)
    changed = 0
    for row, spec in enumerate(crowd.specs):
        if spec.sampling.needs_history:
            said = crowd.histories[row][: spec.num_prompt_tokens]
            logits = crowd.logits[row].double().numpy()
            changed += reference_token(logits, spec, said, EOS) != crowd.expected[row]
    assert changed > 20


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=0.5),
        SamplingParams(max_tokens=9, temperature=1.7),
        SamplingParams(max_tokens=9, top_k=7),
        SamplingParams(max_tokens=9, top_p=0.8),
        SamplingParams(max_tokens=9, min_p=0.15),
        SamplingParams(max_tokens=9, temperature=1.4, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_tokens_come_as_often_as_the_definition_says(sampling: SamplingParams) -> None:
    num_draws, num_tokens = 12_000, 40
    logits = torch.randn(1, num_tokens, generator=torch.Generator().manual_seed(4)) * 1.5
    probabilities = kept_probabilities(logits[0].double().numpy(), sampling)
    spec = SequenceSpec("r", 0, 1, sampling)
    rows = SampledRows([spec] * num_draws, np.zeros(num_draws, int), np.arange(1, num_draws + 1))
    tokens, _ = Sampler(frozenset()).sample(logits.expand(num_draws, -1), rows)
    seen = np.bincount(tokens, minlength=num_tokens)
    assert not seen[probabilities == 0].any()
    assert _chi_square_is_likely(seen, probabilities * num_draws)


def _chi_square_is_likely(seen: np.ndarray, expected: Floats) -> bool:
    """Within four standard deviations; cells with less than five expected are one cell."""
    is_small = expected < 5
    cells = [(float(seen[is_small].sum()), float(expected[is_small].sum()))]
    cells += zip(seen[~is_small].tolist(), expected[~is_small].tolist(), strict=True)
    cells = [(have, want) for have, want in cells if want > 0]
    chi_square: float = sum((have - want) ** 2 / want for have, want in cells)
    freedom = len(cells) - 1
    return bool(abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom))


@pytest.mark.parametrize("value", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_tiny_temperatures_and_nuclei_are_greedy_and_harm_nobody(name: str, value: float) -> None:
    logits = torch.randn(9, VOCAB_SIZE, generator=torch.Generator().manual_seed(8)) * 30
    plain = SamplingParams(max_tokens=9, seed=11)
    tiny = replace(plain, top_p=value) if name == "top_p" else replace(plain, temperature=value)
    specs = [SequenceSpec(str(i), 0, 1, tiny if i % 2 else plain) for i in range(9)]
    neighbours = [SequenceSpec(str(i), 0, 1, plain) for i in range(9)]
    slots, positions = np.arange(9), np.full(9, 4)
    mixed, _ = Sampler(EOS).sample(logits, SampledRows(specs, slots, positions))
    undisturbed, _ = Sampler(EOS).sample(logits, SampledRows(neighbours, slots, positions))
    assert mixed[1::2].tolist() == logits.argmax(-1)[1::2].tolist()
    assert mixed[::2].tolist() == undisturbed[::2].tolist()


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e36])
def test_the_coldest_drawn_row_stays_finite_whatever_the_spread_of_its_scores(
    spread: float,
) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(9)) * spread
    cold = SamplingParams(max_tokens=9, temperature=1.0001e-3, top_p=0.9, min_p=0.1)
    specs = [SequenceSpec(str(i), 0, 1, cold) for i in range(4)]
    tokens, _ = Sampler(EOS).sample(logits, SampledRows(specs, np.arange(4), np.full(4, 4)))
    if spread > 1:
        assert tokens.tolist() == logits.argmax(-1).tolist()
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9])
def test_a_top_k_that_keeps_everything_changes_nothing(top_k: int) -> None:
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    for top_p in (1.0, 0.8):
        drawn = []
        for k in (0, top_k):
            sampling = SamplingParams(max_tokens=9, seed=3, top_k=k, top_p=top_p)
            sampling.validate(VOCAB_SIZE)
            specs = [SequenceSpec(str(i), i, 1, sampling) for i in range(5)]
            rows = SampledRows(specs, np.arange(5), np.full(5, 4))
            drawn.append(Sampler(EOS).sample(logits, rows)[0].tolist())
        assert drawn[0] == drawn[1]


def test_choices_of_one_seed_differ() -> None:
    logits = torch.zeros(8, VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=9, seed=3, n=8)
    specs = [SequenceSpec("r", choice, 1, sampling) for choice in range(8)]
    tokens, _ = Sampler(EOS).sample(logits, SampledRows(specs, np.arange(8), np.full(8, 4)))
    assert len(set(tokens.tolist())) == 8
