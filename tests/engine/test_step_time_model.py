from collections.abc import Callable
from math import inf, isfinite, nan
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_time_model import Prices, StepShape, StepTimeModel
from tests.engine.simulated_machine import CPU, GPU, SimulatedMachine, decodes, with_chunk

SHAPES = st.builds(
    StepShape,
    st.integers(1, 512),
    st.integers(1, 32_768),
    st.floats(0.0, 1e7),
    st.floats(0.0, 1e9),
)
MACHINES = pytest.mark.parametrize(("prices", "chunk"), [(GPU, 2048), (CPU, 64)])


def teach(
    model: StepTimeModel,
    machine: SimulatedMachine,
    steps: int,
    shape_of: Callable[[int], StepShape],
) -> list[float]:
    """Run the steps; the answer is predicted over true seconds of each, before it was seen."""
    ratios = []
    for step in range(steps):
        shape = shape_of(step)
        ratios.append(model.predict(shape) / machine.true_seconds(shape))
        model.observe(shape, machine.measured_seconds(shape))
    return ratios


def mixed(chunk: int) -> Callable[[int], StepShape]:
    def shape_of(step: int) -> StepShape:
        work = decodes(step % 16, 100.0 + step % 50)
        tokens = chunk if step % 3 else chunk // 4
        return with_chunk(work, tokens, step * chunk % 4000) if step % 2 else decodes(16, 150.0)

    return shape_of


def taught(
    prices: Prices, chunk: int, stalls: float = 0.0
) -> tuple[StepTimeModel, SimulatedMachine]:
    model, machine = StepTimeModel(), SimulatedMachine(prices, stalls=stalls)
    teach(model, machine, 400, mixed(chunk))
    return model, machine


def steady(step: int) -> StepShape:
    return decodes(16, 200.0 + step % 300)


@MACHINES
def test_mixed_load_teaches_the_prices(prices: Prices, chunk: int) -> None:
    model, machine = taught(prices, chunk)
    for shape in (decodes(1, 100.0), decodes(16, 150.0), with_chunk(decodes(8, 100.0), chunk, 0.0)):
        assert model.predict(shape) == pytest.approx(machine.true_seconds(shape), rel=0.12)
    assert model.seconds_per_prefill_token(3000.0) == pytest.approx(
        prices.token + 3000 * prices.pair, rel=0.1
    )


@MACHINES
def test_the_first_step_already_tells_the_size_of_the_second(prices: Prices, chunk: int) -> None:
    model, machine = StepTimeModel(), SimulatedMachine(prices)
    first = with_chunk(decodes(2, 50.0), chunk, 0.0)
    model.observe(first, machine.measured_seconds(first))
    second = with_chunk(decodes(3, 50.0), chunk // 2, chunk)
    assert 1 / 2 < model.predict(second) / machine.true_seconds(second) < 2


def test_without_any_step_predictions_are_positive_and_grow_with_the_work() -> None:
    model = StepTimeModel()
    assert 0 < model.predict(decodes(1, 10.0)) < model.predict(with_chunk(decodes(1, 10.0), 64, 0))
    assert 0 < model.seconds_per_prefill_token(0.0) < model.seconds_per_prefill_token(1000.0)


def test_a_first_step_that_warms_up_for_fifty_times_its_time_is_forgotten_within_five() -> None:
    model, machine = StepTimeModel(), SimulatedMachine(CPU)
    shape = with_chunk(decodes(4, 100.0), 32, 0.0)
    model.observe(shape, 50 * machine.true_seconds(shape))
    ratios = teach(model, machine, 5, lambda _: shape)
    assert ratios[-1] == pytest.approx(1.0, abs=0.15)


@MACHINES
@pytest.mark.parametrize("slowdown", [0.5, 2.0, 5.0])
def test_a_machine_that_changes_its_speed_is_followed_within_20_steps(
    prices: Prices, chunk: int, slowdown: float
) -> None:
    model, machine = taught(prices, chunk)
    machine.slowdown = slowdown
    for shape_of in (steady, mixed(chunk)):
        ratios = teach(model, machine, 60, shape_of)
        assert all(0.9 < ratio < 1.12 for ratio in ratios[20:])


def test_a_device_that_hides_its_decodes_behind_a_chunk_is_predicted_in_both_kinds_of_step() -> (
    None
):
    def roofline(shape: StepShape) -> float:
        reading = 6e-3 + 30e-9 * shape.context
        return 1e-3 + max(reading, 20e-6 * shape.num_tokens + 1.5e-9 * shape.prefill_pairs)

    model, ratios = StepTimeModel(), []
    for step in range(400):
        shape = decodes(16, 500.0)
        if step % 10 < 5:
            shape = with_chunk(shape, 1500 + 100 * (step % 7), 2000.0)
        ratios.append(model.predict(shape) / roofline(shape))
        model.observe(shape, roofline(shape))
    assert all(0.93 < ratio < 1.07 for ratio in ratios[100:])


@MACHINES
def test_a_change_of_one_price_alone_is_learned_in_some_hundred_steps(
    prices: Prices, chunk: int
) -> None:
    model, machine = taught(prices, chunk)
    teach(model, machine, 2000, mixed(chunk))
    machine.prices = prices._replace(token=3 * prices.token)
    ratios = teach(model, machine, 700, mixed(chunk))
    assert all(0.9 < ratio < 1.1 for ratio in ratios[500:])


@MACHINES
@pytest.mark.parametrize("factor", [50.0, 0.02])
def test_one_absurd_time_moves_no_prediction(prices: Prices, chunk: int, factor: float) -> None:
    model, machine = taught(prices, chunk)
    shape = decodes(16, 150.0)
    before = model.predict(shape)
    model.observe(shape, factor * machine.true_seconds(shape))
    assert model.predict(shape) == pytest.approx(before, rel=0.05)


@MACHINES
def test_stalls_in_one_step_of_a_hundred_do_not_spoil_predictions(
    prices: Prices, chunk: int
) -> None:
    model, machine = taught(prices, chunk, stalls=0.01)
    ratios = teach(model, machine, 2000, mixed(chunk))
    assert sum(0.9 < ratio < 1.1 for ratio in ratios) > 0.97 * len(ratios)


@MACHINES
def test_what_a_prefill_costs_is_still_known_after_thousands_of_steps_without_one(
    prices: Prices, chunk: int
) -> None:
    model, machine = taught(prices, chunk)
    teach(model, machine, 3000, steady)
    ratios = teach(model, machine, 20, lambda step: with_chunk(decodes(16, 150.0), chunk, 500.0))
    assert all(0.9 < ratio < 1.1 for ratio in ratios)


def test_a_hundred_thousand_equal_steps_leave_the_model_sane_and_ready_to_learn() -> None:
    model, machine = taught(CPU, 64)
    shape = decodes(16, 200.0)
    seconds = [machine.measured_seconds(shape) for _ in range(1000)]
    for step in range(100_000):
        model.observe(shape, seconds[step % 1000])
    assert all(0.0 < price < 1.0 for price in model.prices())
    assert model.predict(shape) == pytest.approx(machine.true_seconds(shape), rel=0.05)
    other = with_chunk(decodes(4, 100.0), 64, 0.0)
    assert model.predict(other) == pytest.approx(machine.true_seconds(other), rel=0.2)
    machine.slowdown = 2.0
    assert teach(model, machine, 21, lambda _: shape)[-1] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf, 1e-300, 1e300])
def test_times_that_no_clock_should_tell_teach_nothing(seconds: float) -> None:
    model = StepTimeModel()
    before = model.prices()
    model.observe(decodes(2, 10.0), seconds)
    model.observe(StepShape(0, 0, 0.0, 0.0), 1.0)
    assert model.prices() == before


@given(st.lists(st.tuples(SHAPES, st.floats(1e-9, 1e6)), max_size=30), SHAPES)
def test_whatever_was_measured_all_prices_are_positive_and_finite(
    steps: list[tuple[StepShape, float]], asked: StepShape
) -> None:
    model = StepTimeModel()
    for shape, seconds in steps:
        model.observe(shape, seconds)
    assert all(price > 0.0 and isfinite(price) for price in model.prices())
    assert 0.0 < model.predict(asked) < inf


def test_learning_and_predicting_cost_microseconds() -> None:
    model, _ = taught(GPU, 2048)
    shape = with_chunk(decodes(16, 150.0), 512, 100.0)
    costs = []
    for _ in range(500):
        start = perf_counter()
        model.observe(shape, model.predict(shape))
        costs.append(perf_counter() - start)
    assert min(costs) < 100e-6
