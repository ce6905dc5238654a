"""SmolLM2 itself: twenty prompts say in float32 what transformers says, token for token.

`benchmarks/parity.py` asks ten times as much.
"""

import random
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from tests.engine.oracle import (
    Prompts,
    engine_words_alone,
    engine_words_together,
    oracle_words,
)

MAX_TOKENS = 8
NUM_ALONE = 6
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Name three primary colours.",
    "def fibonacci(n):",
    "What is 17 + 25?",
    "Who wrote Hamlet?",
    "List the planets.",
    "Explain photosynthesis to a child.",
    "Give me a recipe for pancakes.",
    "日本の首都はどこですか？",
    "Was ist die Hauptstadt von Österreich?",
    "🙂",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In the year 1969,",
    "Once upon a time, in a land far away,",
    "SELECT name FROM users WHERE",
    "Roses are red,",
)


@pytest.fixture(scope="module")
def prompts(demo_model_folder: Path) -> Prompts:
    tokenizer = Tokenizer.from_folder(demo_model_folder)
    return [tokenizer.encode_plain(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(demo_model_folder: Path, prompts: Prompts) -> list[list[int]]:
    return oracle_words(demo_model_folder, prompts, MAX_TOKENS)


def test_alone(demo_model_folder: Path, prompts: Prompts, expected: list[list[int]]) -> None:
    said = engine_words_alone(demo_model_folder, prompts[:NUM_ALONE], MAX_TOKENS)
    assert said == expected[:NUM_ALONE]


def test_together_joining_at_random_times_in_chunks_of_sixteen(
    demo_model_folder: Path, prompts: Prompts, expected: list[list[int]]
) -> None:
    chooser = random.Random(20)
    join_at = [chooser.randrange(12) for _ in prompts]
    assert engine_words_together(demo_model_folder, prompts, MAX_TOKENS, join_at) == expected
