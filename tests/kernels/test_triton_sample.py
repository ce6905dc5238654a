"""Sampling in Triton draws the tokens that the reference draws, in Triton's interpreter."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from kernels.reference.sample import NO_TOKEN, RowSettings
from kernels.reference.sample import sample as reference_sample
from kernels.sample import sample
from tests.kernels.closeness import poisoned

ROWS, VOCAB_SIZE = 6, 8713

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def plain(rows: int = ROWS) -> RowSettings:
    numbers = torch.arange(rows)
    return RowSettings(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        seed=numbers * 2**40 + 2**62 + 7,
        choice=numbers % 3,
        position=numbers * 11,
    )


def some(settings: RowSettings, rows: Tensor) -> RowSettings:
    return RowSettings(**{f.name: getattr(settings, f.name)[rows] for f in fields(RowSettings)})


def mixed() -> RowSettings:
    """Greedy and drawn rows, with every mixture of filters."""
    return replace(
        plain(),
        temperature=torch.rand(ROWS) * 2 * (torch.rand(ROWS) > 0.2),
        top_k=torch.randint(1, 60, (ROWS,)) * (torch.arange(ROWS) % 2),
        top_p=torch.where(torch.arange(ROWS) % 3 > 0, torch.rand(ROWS), 1.0),
        min_p=torch.rand(ROWS) / 5 * (torch.arange(ROWS) % 4 > 1),
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(plain(), id="plain"),
        pytest.param(replace(plain(), temperature=torch.zeros(ROWS)), id="greedy"),
        pytest.param(replace(plain(), temperature=torch.full((ROWS,), 0.002)), id="cold"),
        pytest.param(replace(plain(), top_k=torch.arange(ROWS) * 7 + 1), id="top_k"),
        pytest.param(replace(plain(), top_k=torch.arange(ROWS) + VOCAB_SIZE - 3), id="top_k=all"),
        pytest.param(replace(plain(), top_p=torch.arange(1, ROWS + 1) / 10), id="top_p"),
        pytest.param(replace(plain(), min_p=torch.arange(ROWS) / ROWS), id="min_p"),
        pytest.param(mixed(), id="mixed"),
    ],
)
def test_the_tokens_are_those_of_the_reference(settings: RowSettings) -> None:
    scores = torch.randn(ROWS, VOCAB_SIZE) * 3
    with poisoned():
        tokens = sample(scores, settings)
    assert torch.equal(tokens, reference_sample(scores, settings))


@pytest.mark.parametrize("vocab_size", [1, 33, 8193])
def test_any_vocabulary_is_read_to_its_edge_and_not_beyond(vocab_size: int) -> None:
    wide = torch.full((ROWS, vocab_size + 5), 1e9)
    wide[:, :vocab_size] = torch.randn(ROWS, vocab_size)
    wide[::2, vocab_size - 1] = 90.0
    scores, settings = wide[:, :vocab_size], mixed()
    tokens = sample(scores, settings)
    assert torch.equal(tokens, reference_sample(scores, settings))
    assert bool((tokens[::2] == vocab_size - 1).all())


def test_half_precision_scores_are_drawn_from_as_they_are() -> None:
    scores, settings = torch.randn(ROWS, 513).half() * 3, mixed()
    assert torch.equal(sample(scores, settings), reference_sample(scores, settings))


def test_a_row_is_drawn_as_it_would_be_alone() -> None:
    scores, settings = torch.randn(ROWS, 1009) * 3, mixed()
    order = torch.randperm(ROWS)
    shuffled = sample(scores[order], some(settings, order))
    assert torch.equal(shuffled, sample(scores, settings)[order])


def test_rows_without_finite_scores_give_no_token_and_touch_no_other() -> None:
    scores, settings = torch.randn(ROWS, 1009), mixed()
    sound = sample(scores, settings)
    scores[1, 1008] = math.nan
    scores[2, 0] = math.inf
    scores[3] = -math.inf
    scores[4, 17], scores[4, 900] = math.inf, math.nan
    tokens = sample(scores, settings)
    assert tokens[1:5].tolist() == [NO_TOKEN] * 4
    assert torch.equal(tokens[::5], sound[::5])
    assert torch.equal(tokens, reference_sample(scores, settings))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_impossible_tokens_are_never_drawn(filters: dict[str, float]) -> None:
    scores = torch.full((ROWS, 300), -math.inf)
    scores[:, 7], scores[:, 299] = 0.0, 0.5
    settings = plain()
    for name, value in filters.items():
        old = getattr(settings, name)
        settings = replace(settings, **{name: torch.full_like(old, value)})
    assert set(sample(scores, settings).tolist()) <= {7, 299}


def test_equals_of_the_last_one_kept_are_kept_too() -> None:
    scores = torch.zeros(20, 5)
    scores[:, 4] = -1.0
    settings = replace(plain(20), top_k=torch.full((20,), 2))
    assert set(sample(scores, settings).tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals() -> None:
    scores = torch.zeros(2, 9000)
    scores[0, 8500:8600] = 1.0
    settings = replace(plain(2), temperature=torch.zeros(2))
    assert sample(scores, settings).tolist() == [8500, 0]
