"""Learns, while serving, how long a step takes from what it computes.

    seconds = speed * (base + row * num_rows + token * num_tokens
                            + context * context + pair * prefill_pairs)

A step with a chunk has a base of its own: a device that reads its weights while it computes
hides the one behind the other, and no single line fits both kinds of step.

Two clocks of learning. The six prices are fitted slowly, over the last hundreds of steps;
`speed` follows the last few steps, because a machine that gets slower gets slower in
everything, and at once. Steps with a chunk have a speed of their own too, so that what the
prices get wrong about chunks is not taken for what decodes cost. What a steady load cannot tell
apart (a thousand steps of sixteen decodes say nothing about prefill) keeps the price that it had.
No clock, no I/O.
"""

from operator import add
from typing import NamedTuple

from engine.scheduling.scheduler_output import SchedulerOutput

# What old steps count less with each step: the prices remember about 100 steps of each kind.
FORGETTING = 0.99
# Holds a price where it is unless the remembered steps, all together, say more than this share.
DAMPING = 1e-3
# The two bases are alike until the steps say otherwise, in the same measure.
BASES_TIE = 3e-3
# Pulls the proportions of prices towards the guessed ones where the steps say little: how much of
# a step of sixteen decodes is paid by the row, only steps of other sizes can tell.
RIDGE = 2e-4
# Sweeps of the fit per step. It starts where it ended, so that few are needed.
SWEEPS = 2
# `speed` closes this part of its distance to the median of the last steps: a lasting change is
# followed within 8 steps, a single stalled step (garbage collection, a page fault) not at all.
SPEED_GAIN = 0.5
# Small distances are mostly jitter: one of 2 % is closed by a tenth only.
SPEED_DOUBT = 5.0
NUM_RECENT = 5
# A kind of step that has not been seen for so many steps takes over the changes of the other.
STALE_AFTER = 32
# How much of `speed` is taken out of a step before the prices learn from it (an exponent). All of
# it would keep what is remembered true whatever the machine's speed, but let the two drift apart
# without bound; with nine tenths a lasting change of speed moves into the prices in 1000 steps.
SPEED_SHARE = 0.9
# The prices believe no step to be further from its prediction than this factor.
MAX_SURPRISE = 2.0
# Steps outside of these seconds were not timed by a working clock.
SHORTEST_S, LONGEST_S = 1e-9, 1e6
# Guesses to start from. Their sum is off by any factor until the first step; their proportions
# are between those of a large accelerator and those of a small CPU.
PRIOR_PRICES = (2e-3, 2e-3, 2e-5, 4e-5, 4e-8, 6e-9)
NUM_PRICES = len(PRIOR_PRICES)
# No price falls below this part of its guess: nothing is free, and predictions stay positive.
LEAST_WEIGHT = 1e-6


class StepShape(NamedTuple):
    """What decides how long a step takes.

    `num_rows` sequences compute `num_tokens` tokens. `context` is the KV tokens that the rows
    look at, each row's counted once; `prefill_pairs` the sum over rows of several tokens of their
    count times the mean context that each of their tokens looks at.
    """

    num_rows: int
    num_tokens: int
    context: float
    prefill_pairs: float

    @classmethod
    def of(cls, work: SchedulerOutput) -> "StepShape":
        """The shape of a step."""
        is_chunk = work.counts > 1
        chunks, starts = work.counts[is_chunk], work.starts[is_chunk]
        pairs = (chunks * (starts + (chunks + 1) / 2)).sum()
        return cls(work.num_rows, work.num_tokens, float(work.ends.sum()), float(pairs))

    @property
    def has_chunk(self) -> bool:
        """Whether some row computes several tokens."""
        return self.prefill_pairs > 0.0


class Prices(NamedTuple):
    """Seconds per thing; all are positive.

    `base` is paid by a step of decodes alone and `chunk_base` by one with a chunk, then each
    row, each token, each token of context, each prefill pair.
    """

    base: float
    chunk_base: float
    row: float
    token: float
    context: float
    pair: float


class StepTimeModel:
    """Predicts seconds from shapes; every observed step makes it a little better."""

    def __init__(self) -> None:
        self._num_observed = 0
        self._speeds = [1.0, 1.0]
        self._last_seen = [0, 0]
        # In units of PRIOR_PRICES, so that all six are numbers of about the same size.
        self._weights = [1.0] * NUM_PRICES
        # The remembered steps as normal equations. Each step counts by its relative error
        # (features and seconds are divided by the seconds): short steps matter as much as long.
        self._with_chunks = _Memory()
        self._decodes_only = _Memory()
        self._recent: tuple[list[tuple[list[float], float]], ...] = ([], [])

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn that a step of this shape took so long.

        Steps without rows and times that no clock should tell (zero, days, NaN) teach nothing.
        """
        if shape.num_rows == 0 or not SHORTEST_S <= seconds <= LONGEST_S:
            return
        features, kind = _features(shape), int(shape.has_chunk)
        recent = self._recent[kind]
        recent.append((features, seconds))
        if len(recent) > NUM_RECENT:
            del recent[0]
        self._num_observed += 1
        if self._num_observed == 1:
            # The first step sets the size of all prices, their proportions stay the guess.
            scale = seconds / _dot(self._weights, features)
            self._weights = [weight * scale for weight in self._weights]
        expected = self._speeds[kind] * _dot(self._weights, features)
        believed = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        memory = self._with_chunks if kind else self._decodes_only
        believed /= self._speeds[kind] ** SPEED_SHARE
        memory.add([feature / believed for feature in features])
        self._fit_prices()
        self._follow_speed(kind)

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape will take; positive."""
        return self._speeds[shape.has_chunk] * _dot(self._weights, _features(shape))

    def prices(self, *, has_chunk: bool = False) -> Prices:
        """What the machine charges at its present speed in steps with a chunk or without one."""
        speed = self._speeds[has_chunk]
        return Prices._make(
            [
                speed * weight * prior
                for weight, prior in zip(self._weights, PRIOR_PRICES, strict=True)
            ]
        )

    def seconds_per_prefill_token(self, context: float) -> float:
        """What one more token of a chunk costs that reads `context` tokens of KV."""
        prices = self.prices(has_chunk=True)
        return prices.token + prices.context + prices.pair * context

    def _fit_prices(self) -> None:
        """Bounded least squares by damped coordinate descent from the present prices."""
        weights = self._weights
        matrix, vector = self._with_chunks.plus(self._decodes_only)
        known = sum(matrix[i][i] for i in range(NUM_PRICES))
        damping = DAMPING * known
        tie = BASES_TIE * known
        # What all prices would be in units of their guesses, if those were in proportion.
        level = sum(vector) / sum(map(sum, matrix))
        for i in range(NUM_PRICES):
            matrix[i][i] += RIDGE * known
            vector[i] += RIDGE * known * level
        matrix[0][0] += tie
        matrix[1][1] += tie
        matrix[0][1] -= tie
        matrix[1][0] -= tie
        for _ in range(SWEEPS):
            for i, row in enumerate(matrix):
                gradient = vector[i] - _dot(row, weights)
                weights[i] = max(LEAST_WEIGHT, weights[i] + gradient / (row[i] + damping))

    def _follow_speed(self, kind: int) -> None:
        """Take what the prices cannot explain in the last steps for the machine's speed."""
        recent = self._recent[kind]
        ratios = sorted(seconds / _dot(self._weights, features) for features, seconds in recent)
        # The lower of two medians: what disturbs a step makes it longer.
        median = ratios[(len(ratios) - 1) // 2]
        before = self._speeds[kind]
        gap = median / before - 1.0
        is_new = self._num_observed < NUM_RECENT
        gain = 1.0 if is_new else min(SPEED_GAIN, SPEED_DOUBT * abs(gap))
        self._speeds[kind] = before * (1.0 + gain * gap)
        self._last_seen[kind] = self._num_observed
        if self._num_observed - self._last_seen[1 - kind] > STALE_AFTER or is_new:
            # Nothing is known of the other kind; the machine itself has changed by so much.
            self._speeds[1 - kind] *= self._speeds[kind] / before
            self._recent[1 - kind].clear()


class _Memory:
    """Steps of one kind as normal equations; each step makes the earlier ones count less."""

    def __init__(self) -> None:
        self._matrix = [[0.0] * NUM_PRICES for _ in range(NUM_PRICES)]
        self._vector = [0.0] * NUM_PRICES

    def add(self, features: list[float]) -> None:
        """Remember a step, given its features divided by its seconds."""
        # Spelled out, because this is done in every step: a third of the time of two loops.
        a, b, c, d, e, f = features
        self._matrix = [
            [
                FORGETTING * p + x * a,
                FORGETTING * q + x * b,
                FORGETTING * r + x * c,
                FORGETTING * s + x * d,
                FORGETTING * t + x * e,
                FORGETTING * u + x * f,
            ]
            for (p, q, r, s, t, u), x in zip(self._matrix, features, strict=True)
        ]
        self._vector = [FORGETTING * old + x for old, x in zip(self._vector, features, strict=True)]

    def plus(self, other: "_Memory") -> tuple[list[list[float]], list[float]]:
        """The normal equations of both together."""
        matrix = [
            list(map(add, mine, its)) for mine, its in zip(self._matrix, other._matrix, strict=True)
        ]
        return matrix, list(map(add, self._vector, other._vector))


def _features(shape: StepShape) -> list[float]:
    base, chunk_base, row, token, context, pair = PRIOR_PRICES
    return [
        0.0 if shape.has_chunk else base,
        chunk_base if shape.has_chunk else 0.0,
        row * shape.num_rows,
        token * shape.num_tokens,
        context * shape.context,
        pair * shape.prefill_pairs,
    ]


def _dot(left: list[float], right: list[float]) -> float:
    a, b, c, d, e, f = left
    u, v, w, x, y, z = right
    return a * u + b * v + c * w + d * x + e * y + f * z
