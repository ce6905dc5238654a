"""The decision between offload and recompute is nearly that of somebody who knows the costs."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache.swap_cost import MIN_MEASUREMENTS, SwapCost

SECONDS_PER_TOKEN = 1e-4
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """True costs, and how noisily they show: log-normal, and now and then twenty times as much."""

    fixed: float = 5e-5
    per_block: float = 8e-5
    sigma: float = 0.3
    hiccup: float = 0.03

    def move(self, num_blocks: int) -> float:
        return self.fixed + self.per_block * num_blocks

    def measured(self, num_blocks: int, rng: np.random.Generator) -> float:
        slow = 20.0 if rng.random() < self.hiccup else 1.0
        return float(self.move(num_blocks) * np.exp(rng.normal(0, self.sigma)) * slow)


def regret(machines: list[Machine], seed: int, reuse: float = 1.0, each: int = 500) -> float:
    """What the decisions cost beyond those of an oracle, as a share; one machine after another."""
    rng = np.random.default_rng(seed)
    cost = SwapCost()
    paid = least = 0.0
    for machine in machines:
        for _ in range(each):
            num_blocks = int(rng.integers(2, 200))
            num_tokens = int(num_blocks * BLOCK_SIZE * rng.uniform(0.1, 1.0))
            offload = machine.move(num_blocks) * (1 + reuse)
            recompute = reuse * num_tokens * SECONDS_PER_TOKEN
            least += min(offload, recompute)
            if cost.is_offload_cheaper(num_blocks, num_tokens, SECONDS_PER_TOKEN, reuse):
                paid += offload
                for _ in range(2 if rng.random() < reuse else 1):
                    cost.observe_moves(num_blocks, machine.measured(num_blocks, rng))
            else:
                paid += recompute
    return paid / least - 1.0


@pytest.mark.parametrize(
    ("machine", "reuse"),
    [
        pytest.param(Machine(), 1.0, id="moving is cheap"),
        pytest.param(Machine(per_block=4e-4), 1.0, id="nearly even"),
        pytest.param(Machine(per_block=1e-3), 1.0, id="moving is dear"),
        pytest.param(Machine(fixed=5e-3), 1.0, id="dear for few blocks"),
        pytest.param(Machine(), 0.3, id="seldom used again"),
    ],
)
def test_the_decisions_cost_at_most_a_twentieth_more_than_the_best(
    machine: Machine, reuse: float
) -> None:
    assert max(regret([machine], seed, reuse) for seed in range(3)) <= 0.05


def test_a_machine_that_became_slow_and_fast_again_is_noticed() -> None:
    machines = [Machine(), Machine(per_block=8e-4), Machine()]
    assert max(regret(machines, seed) for seed in range(3)) <= 0.1


def test_the_first_offloads_happen_so_that_they_are_measured() -> None:
    cost = SwapCost()
    for _ in range(MIN_MEASUREMENTS):
        assert cost.is_offload_cheaper(10, 160, SECONDS_PER_TOKEN)
        cost.observe_moves(10, 5.0)
    assert not cost.is_offload_cheaper(10, 160, SECONDS_PER_TOKEN)


def test_a_dear_offload_is_tried_again_once_it_is_affordable() -> None:
    cost = SwapCost()
    for _ in range(MIN_MEASUREMENTS):
        cost.observe_moves(10, 0.016)
    answers = [cost.is_offload_cheaper(10, 160, SECONDS_PER_TOKEN) for _ in range(1000)]
    # A probe costs once again the price of a recomputation; a hundredth may go into probes.
    assert 5 <= sum(answers) <= 10


def test_one_wild_measurement_changes_nothing() -> None:
    cost = SwapCost()
    for num_blocks in range(1, 31):
        cost.observe_moves(num_blocks, 0.001 + 0.0001 * num_blocks)
    cost.observe_moves(5, 100.0)
    assert cost.move_seconds(20) == pytest.approx(0.003, rel=0.05)


def test_nothing_is_offloaded_that_costs_nothing_to_recompute_or_is_never_used_again() -> None:
    cost = SwapCost()
    assert not cost.is_offload_cheaper(10, 0, SECONDS_PER_TOKEN)
    assert not cost.is_offload_cheaper(10, 160, SECONDS_PER_TOKEN, reuse=0.0)


def test_idle_reuse_is_defined_from_the_start_and_follows_what_happens() -> None:
    cost = SwapCost()
    assert cost.idle_reuse == 0.5
    evict_idle(cost, 2000)
    hit_idle(cost, 200)
    assert cost.idle_reuse == pytest.approx(0.1, abs=0.05)
    for _ in range(200):
        evict_idle(cost, 100)
        hit_idle(cost, 100)
    assert cost.idle_reuse > 0.9


def test_the_belief_that_idle_blocks_never_return_fades_while_none_is_offloaded() -> None:
    cost = SwapCost()
    for _ in range(MIN_MEASUREMENTS):
        cost.observe_moves(10, 0.002)
    evict_idle(cost, 20_000)

    def is_kept() -> bool:
        return cost.is_offload_cheaper(10, 160, SECONDS_PER_TOKEN, cost.idle_reuse)

    assert not is_kept()
    assert any(is_kept() for _ in range(2500))


@given(
    moves=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e4)), max_size=50),
    idle=st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=20),
    asked=st.integers(1, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_costs_are_never_negative_and_reuse_is_a_share(
    moves: list[tuple[int, float]], idle: list[tuple[bool, int]], asked: int
) -> None:
    cost = SwapCost()
    for num_blocks, seconds in moves:
        cost.observe_moves(num_blocks, seconds)
    for is_hit, num_blocks in idle:
        (hit_idle if is_hit else evict_idle)(cost, num_blocks)
        assert 0.0 < cost.idle_reuse < 1.0
    assert 0.0 <= cost.move_seconds(asked) <= cost.move_seconds(asked + 1)


def evict_idle(cost: SwapCost, num_blocks: int) -> None:
    for _ in range(num_blocks):
        cost.observe_idle_eviction()


def hit_idle(cost: SwapCost, num_blocks: int) -> None:
    for _ in range(num_blocks):
        cost.observe_idle_hit()
