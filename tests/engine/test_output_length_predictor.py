"""The predictor learns what outputs become, from complete and cut ones, and trusts nobody much."""

from collections.abc import Callable
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.output_length_predictor import QUANTILE, OutputLengthPredictor

NO_LIMIT = 10**6
NORMAL_QUANTILE = NormalDist().inv_cdf(QUANTILE)
Lengths = Callable[[np.random.Generator], int]


def lognormal(median: float, sigma: float = 0.8) -> Lengths:
    return lambda rng: int(np.ceil(rng.lognormal(np.log(median), sigma)))


def bimodal(rng: np.random.Generator) -> int:
    is_short = rng.random() < 0.6
    return int(np.ceil(rng.normal(20, 3) if is_short else rng.normal(700, 60)))


def learned(
    lengths: Lengths, count: int = 300, caps: tuple[int, ...] = (NO_LIMIT,), seed: int = 0
) -> OutputLengthPredictor:
    rng = np.random.default_rng(seed)
    predictor = OutputLengthPredictor()
    for number in range(count):
        show(predictor, "a", lengths(rng), caps[number % len(caps)])
    return predictor


def show(predictor: OutputLengthPredictor, scope: str, length: int, cap: int = NO_LIMIT) -> None:
    predictor.observe(scope, min(length, cap), length <= cap)


def share_within(
    predictor: OutputLengthPredictor, lengths: Lengths, so_far: int = 0, count: int = 2000
) -> float:
    """Of the lengths longer than `so_far`, the share that ends within its projection."""
    rng = np.random.default_rng(99)
    projected = predictor.expected_output("a", so_far, NO_LIMIT)
    longer = [length for length in (lengths(rng) for _ in range(count)) if length > so_far]
    return sum(length <= projected for length in longer) / len(longer)


@pytest.mark.parametrize("lengths", [lognormal(200), lognormal(900, 1.2), bimodal])
def test_the_quantile_covers_its_share(lengths: Lengths) -> None:
    shares = [share_within(learned(lengths, seed=seed), lengths) for seed in range(6)]
    # A lone scope errs to the long side: the voices that are absent say "it never ends".
    assert QUANTILE - 0.02 < np.mean(shares) < QUANTILE + 0.06
    assert min(shares) > QUANTILE - 0.12


def test_caps_on_most_sequences_do_not_shorten_what_the_others_are_expected_to_become() -> None:
    # Half of all are cut before the median, a quarter around the quantile that is asked for.
    caps = (64, 128, 400, NO_LIMIT)
    lengths = lognormal(200)
    shares = [share_within(learned(lengths, 300, caps, seed), lengths) for seed in range(8)]
    assert np.mean(shares) == pytest.approx(QUANTILE, abs=0.06)


def test_where_every_sequence_was_cut_the_limit_is_expected() -> None:
    predictor = learned(lognormal(800, 0.3), caps=(100,))
    assert predictor.expected_output("a", 0, 4096) == 4096


def test_a_sequence_that_outgrew_its_projection_gets_a_new_one_for_its_like() -> None:
    predictor = learned(bimodal)
    # Whoever is past the short mode is of the long one.
    first = predictor.expected_output("a", 60, NO_LIMIT)
    assert 680 < first < 900
    lengths = lognormal(200)
    for so_far in (100, 200, 300):
        shares = [share_within(learned(lengths, seed=s), lengths, so_far) for s in range(6)]
        assert np.mean(shares) == pytest.approx(QUANTILE, abs=0.12)


def test_without_data_the_most_is_expected() -> None:
    assert OutputLengthPredictor().expected_output("new", 0, 777) == 777
    # A first short ending says little: the long ones of the same start are still running.
    predictor = OutputLengthPredictor()
    for _ in range(3):
        predictor.observe("a", 5, is_complete=True)
    assert predictor.expected_output("a", 0, 777) == 777


@pytest.mark.parametrize("factor", [1 / 8, 1 / 3, 3, 8])
def test_a_changed_scope_is_learned_again_within_fifty_requests(factor: float) -> None:
    new = lognormal(240 * factor)
    ratios = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        predictor = learned(lognormal(240), 200, seed=seed)
        for _ in range(50):
            show(predictor, "a", new(rng))
        true_quantile = 240 * factor * np.exp(0.8 * NORMAL_QUANTILE)
        ratios.append(predictor.expected_output("a", 0, NO_LIMIT) / true_quantile)
    assert 0.75 < np.median(ratios) < 1.5


def test_a_steady_scope_is_not_mistaken_for_a_changed_one() -> None:
    rng = np.random.default_rng(5)
    predictor = OutputLengthPredictor()
    projections = []
    for number in range(1500):
        show(predictor, "a", lognormal(200)(rng))
        if number > 100:
            projections.append(predictor.expected_output("a", 0, NO_LIMIT))
    steps = [later / earlier for earlier, later in pairwise(projections)]
    assert max(steps) < 1.35


def test_a_new_scope_starts_from_what_the_others_have_shown() -> None:
    rng = np.random.default_rng(1)
    predictor = OutputLengthPredictor()
    for number in range(600):
        show(predictor, f"tenant {number % 20}", lognormal(200)(rng))
    true_quantile = 200 * np.exp(0.8 * NORMAL_QUANTILE)
    assert predictor.expected_output("new", 0, 4096) == pytest.approx(true_quantile, rel=0.25)


@pytest.mark.parametrize("lie", [1, NO_LIMIT])
def test_a_tenant_that_lies_moves_the_others_no_more_than_its_one_voice(lie: int) -> None:
    rng = np.random.default_rng(2)
    honest, lied_to = OutputLengthPredictor(), OutputLengthPredictor()
    for number in range(600):
        scope, length = f"tenant {number % 20}", lognormal(200)(rng)
        for predictor in (honest, lied_to):
            show(predictor, scope, length)
        for _ in range(5):
            show(lied_to, "liar", lie)
    for scope, bound in (("tenant 3", 1.1), ("new", 1.35)):
        before = honest.expected_output(scope, 0, NO_LIMIT)
        after = lied_to.expected_output(scope, 0, NO_LIMIT)
        assert before / bound <= after <= before * bound


def test_a_lone_tenant_cannot_teach_the_engine_what_newcomers_do() -> None:
    predictor = OutputLengthPredictor()
    for _ in range(500):
        predictor.observe("liar", 1, is_complete=True)
    assert predictor.expected_output("new", 0, 4096) == 4096


def test_the_scope_that_was_silent_longest_is_forgotten_with_its_voice() -> None:
    predictor = OutputLengthPredictor(max_scopes=12)
    for scope in range(200):
        for _ in range(10):
            predictor.observe(f"old {scope}", 10, is_complete=True)
    for scope in range(12):
        for _ in range(10):
            predictor.observe(f"{scope}", 1000, is_complete=True)
    predictor.check()
    assert 900 < predictor.expected_output("old 3", 0, 4096) < 1100


def test_a_cancellation_before_the_first_token_says_nothing() -> None:
    predictor = OutputLengthPredictor(max_scopes=1)
    for _ in range(50):
        predictor.observe("a", 10, is_complete=True)
    known = predictor.expected_output("a", 0, 4096)
    assert known < 20
    for scope in "bcd":
        predictor.observe(scope, 0, is_complete=False)
    assert predictor.expected_output("a", 0, 4096) == known


@given(
    endings=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 1 << 22), st.booleans()), max_size=30
    ),
    repeat=st.sampled_from([1, 15]),
    questions=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 1 << 22), st.integers(1, 1 << 22)),
        min_size=1,
        max_size=10,
    ),
)
@settings(max_examples=40, deadline=None)
def test_every_projection_is_ahead_of_the_sequence_and_within_its_limit(
    endings: list[tuple[str, int, bool]], repeat: int, questions: list[tuple[str, int, int]]
) -> None:
    predictor = OutputLengthPredictor(max_scopes=2)
    for scope, length, is_complete in endings * repeat:
        predictor.observe(scope, length, is_complete)
        predictor.check()
    for scope, so_far, limit in questions:
        projected = predictor.expected_output(scope, min(so_far, limit), limit)
        assert min(so_far + 1, limit) <= projected <= limit


def test_a_quantile_outside_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantile is 1\.0"):
        OutputLengthPredictor(quantile=1.0)
    with pytest.raises(ValueError, match="max_scopes is 0"):
        OutputLengthPredictor(max_scopes=0)
