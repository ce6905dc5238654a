"""A few of the prompts, a few words each; the benchmark itself takes all."""

from pathlib import Path

from benchmarks.first_differences import Difference
from benchmarks.parity import Parity, measure


def test_words_and_prompts_are_those_of_transformers(demo_model_folder: Path) -> None:
    parity = measure(demo_model_folder, num_ranks=1, topics=["kites"], max_tokens=3)
    assert parity.is_met, parity.table()
    assert (parity.num_prompts, parity.num_tokens) == (8, 24)


def test_a_difference_that_is_no_tie_misses_the_bar() -> None:
    for gap, is_met in ((1e-5, True), (0.1, False)):
        difference = Difference(sequence=3, position=9, logit_gap=gap, are_top_two=True)
        assert Parity("transformers", 4, 90, 0, [difference]).is_met is is_met
    assert not Parity("transformers", 4, 90, 1, []).is_met
