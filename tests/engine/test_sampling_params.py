import math
from dataclasses import replace
from typing import Any

import pytest

from engine.interface.errors import InvalidRequest
from engine.interface.sampling_params import SamplingParams

VOCAB_SIZE = 100
PLAIN = SamplingParams(max_tokens=10)
NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
}


def validate(**fields: Any) -> None:
    replace(PLAIN, **fields).validate(VOCAB_SIZE)


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(**fields)
    assert str(caught.value).startswith(caught.value.param)
    return caught.value.param


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite_and_in_their_range(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, high):
        validate(**{name: value})
    wrong: list[object] = [low - 0.001, high + 0.001, math.nan, math.inf, -math.inf, "1", True]
    for bad in [*wrong, None, 10**400]:
        assert refused(**{name: bad}) == name


@pytest.mark.parametrize("seed", [10**20, 2**63, -1, "100", 1.5, True])
def test_a_seed_is_a_whole_number_of_63_bits(seed: object) -> None:
    assert refused(seed=seed) == "seed"


@pytest.mark.parametrize(
    "bias",
    [
        ((VOCAB_SIZE, 1.0),),
        ((-1, 1.0),),
        ((True, 1.0),),
        ((1, math.nan),),
        ((1, math.inf),),
        ((1, 100.5),),
        ((1, -101),),
        ((1, 1.0), (1, 1.0)),
        tuple((i, 1.0) for i in range(301)),
    ],
)
def test_a_bias_names_few_tokens_once_each_within_limits(bias: object) -> None:
    assert refused(logit_bias=bias) == "logit_bias"


def test_a_bias_may_name_300_tokens() -> None:
    replace(PLAIN, logit_bias=tuple((i, -100 + i / 2) for i in range(300))).validate(1000)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_at_most_twenty_likeliest_tokens_are_listed(name: str) -> None:
    for count in (None, 0, 20):
        validate(**{name: count})
    for wrong in (-1, 21, True, 1.0):
        assert refused(**{name: wrong}) == name


def test_only_a_prompt_that_is_scored_may_go_without_an_output() -> None:
    assert refused(max_tokens=0) == "max_tokens"
    validate(max_tokens=0, prompt_logprobs=0)
    assert refused(max_tokens=0, prompt_logprobs=0, min_tokens=1) == "min_tokens"
    assert refused(max_tokens=-1, prompt_logprobs=0) == "max_tokens"


def test_off_has_two_spellings_for_top_k() -> None:
    for top_k in (-1, 0, 1, VOCAB_SIZE + 1, 10**9):
        validate(top_k=top_k)
    for wrong in (-2, 1.0, True):
        assert refused(top_k=wrong) == "top_k"
