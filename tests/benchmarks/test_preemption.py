"""Preempted sequences of a model say what they say with room for all."""

from pathlib import Path

import pytest

from benchmarks.first_differences import Difference
from benchmarks.preemption import Load, measure
from engine.models.loader import load_decoder
from tests.engine.oracle import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD = Load(
    num_requests=16,
    num_tokens=160,
    prompt_tokens=(20, 60),
    num_fitting=3,
    max_num_batched_tokens=64,
    min_preemptions=10,
)


def test_words_survive_preemption(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    lengths = range(20, 52, 2)
    prompts = [tuple(3 + (7 * i + j * j) % 250 for j in range(n)) for i, n in enumerate(lengths)]
    result = measure(load_decoder(tmp_path, "float32"), prompts, LOAD)
    assert result.is_met, result.table()
    on_host = result.others[0][0].stats
    assert on_host.offloaded_blocks_total > 0


def test_a_difference_is_excused_only_when_both_words_scored_the_same() -> None:
    assert Difference(0, 5, 1e-5, are_top_two=True).is_tie
    assert not Difference(0, 5, 1e-2, are_top_two=True).is_tie
    assert not Difference(0, 5, 1e-5, are_top_two=False).is_tie
