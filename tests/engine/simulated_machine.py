"""A machine whose step times are known by formula, with jitter, stalls and a speed of its own."""

from random import Random

from engine.scheduling.step_time_model import Prices, StepShape

GPU = Prices(base=1e-3, chunk_base=1e-3, row=0.0, token=20e-6, context=30e-9, pair=1.5e-9)
CPU = Prices(base=20e-3, chunk_base=22e-3, row=0.0, token=1e-3, context=2e-6, pair=4e-7)


class SimulatedMachine:
    """Takes `slowdown` times what its prices say, give or take `jitter`, and at times stalls."""

    def __init__(self, prices: Prices, seed: int = 1, stalls: float = 0.0) -> None:
        self.prices = prices
        self.slowdown = 1.0
        self.jitter = 0.05
        self.stalls = stalls
        self._random = Random(seed)

    def true_seconds(self, shape: StepShape) -> float:
        prices = self.prices
        return self.slowdown * (
            (prices.chunk_base if shape.prefill_pairs > 0.0 else prices.base)
            + prices.row * shape.num_rows
            + prices.token * shape.num_tokens
            + prices.context * shape.context
            + prices.pair * shape.prefill_pairs
        )

    def measured_seconds(self, shape: StepShape) -> float:
        stall = 50.0 if self._random.random() < self.stalls else 1.0
        jitter = self._random.uniform(1.0 - self.jitter, 1.0 + self.jitter)
        return self.true_seconds(shape) * jitter * stall


def decodes(num_rows: int, context: float) -> StepShape:
    """So many decodes, each reading `context` tokens."""
    return StepShape(num_rows, num_rows, num_rows * context, 0.0)


def with_chunk(work: StepShape, tokens: int, context: float) -> StepShape:
    """The same with a chunk of so many tokens behind `context` tokens."""
    pairs = tokens * (context + tokens / 2)
    return StepShape(
        work.num_rows + 1,
        work.num_tokens + tokens,
        work.context + context + tokens,
        work.prefill_pairs + pairs,
    )
