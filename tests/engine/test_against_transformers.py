"""The numbers are those of Hugging Face transformers on the same weights."""

import random
from pathlib import Path

import pytest

from tests.engine.oracle import (
    Prompts,
    engine_words_alone,
    engine_words_together,
    oracle_words,
    write_tiny_llama,
)

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 24


def some_prompts() -> Prompts:
    chooser = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 33, 70, 150]
    return [tuple(chooser.randrange(3, 260) for _ in range(length)) for length in lengths]


@pytest.fixture(scope="module", params=["tied", "untied", "biased"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder, tied=request.param != "untied", bias=request.param == "biased")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    words = oracle_words(folder, some_prompts(), MAX_TOKENS)
    assert len({tuple(w) for w in words}) == len(words), "the oracle says the same to everyone"
    return words


def test_each_prompt_alone_is_continued_as_by_transformers(
    folder: Path, expected: list[list[int]]
) -> None:
    assert engine_words_alone(folder, some_prompts(), MAX_TOKENS) == expected


@pytest.mark.parametrize("seed", range(4))
def test_prompts_joining_at_random_times_are_continued_as_by_transformers(
    folder: Path, expected: list[list[int]], seed: int
) -> None:
    chooser = random.Random(seed)
    join_at = [chooser.randrange(20) for _ in expected]
    assert engine_words_together(folder, some_prompts(), MAX_TOKENS, join_at) == expected
