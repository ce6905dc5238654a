"""Foresees how long an output becomes, so that KV is promised to what will be, not to what may.

Every ended sequence leaves its length behind. One that was cut (max_tokens, a cancellation, a
deadline) is censored: it says only "at least this long". The estimator that counts both kinds
right is the product limit: of those who got as far as a length, which share ended there?

What one scope (a tenant on this model) has shown weighs most. What it has not is filled in by
all scopes together, each with one voice however much it sends, so that nobody can teach the
engine much about somebody else.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

# The share of sequences that should end within their first projection. Admission looks at many
# sequences together, so the errors of single ones even out: a higher quantile leaves blocks
# idle, a lower one trusts in luck. `benchmarks.kv_admission` shows what it comes to.
QUANTILE = 0.8

# A sequence counts half after 44 later ones of its scope: 64 remembered ones in all.
MEMORY = 64.0
# The prior that all scopes form together weighs as much as this many sequences.
PRIOR_WEIGHT = 2.0
# Nobody has more than a tenth of the say: absent voices say "it never ends".
MIN_VOICES = 10.0
# A scope has its full voice once it has shown this much.
FULL_VOICE = 8.0

# A scope's lengths fall evenly over the ranks 0 .. 1 of its own past. When the average rank of
# about the last 16 is this far from the middle, the scope has changed: its past is worth
# little. By chance that is four standard deviations.
DRIFT_MEMORY = 16.0
DRIFT_LIMIT = 0.2
DRIFT_MIN_WEIGHT = 24.0
WEIGHT_AFTER_DRIFT = 2.0

_OCTAVES = 20
_BUCKETS_PER_OCTAVE = 8


def _bucket_edges() -> NDArray[np.int64]:
    exponents = np.arange(_OCTAVES * _BUCKETS_PER_OCTAVE + 1) / _BUCKETS_PER_OCTAVE
    return np.unique(np.concatenate(([0], np.rint(2.0**exponents)))).astype(np.int64)


# Bucket b holds the lengths in (edges[b], edges[b + 1]]; powers of two are edges, because
# callers like them as max_tokens.
_EDGES = _bucket_edges()
_EDGE_LIST: list[int] = _EDGES.tolist()
_NUM_BUCKETS = len(_EDGES) - 1
_LONGEST = _EDGE_LIST[-1]


class OutputLengthPredictor:
    """The learned quantile of output lengths, by scope.

    The product-limit estimator is that of Kaplan and Meier, "Nonparametric Estimation from
    Incomplete Observations" (JASA 53, 1958), over buckets an eighth of an octave wide. It is
    shrunk towards a prior curve as by Susarla and Van Ryzin, "Nonparametric Bayesian
    Estimation of Survival Curves from Incomplete Observations" (JASA 71, 1976): without
    censoring that is the mixture of n own lengths with PRIOR_WEIGHT from the prior. The prior
    is the average of the scopes' own curves, with at least MIN_VOICES voices in it: one scope
    moves it by no more than 1 / MIN_VOICES at any length.

    `max_scopes` bounds the memory (3 KiB each); the scope whose last sequence ended longest
    ago is forgotten first.

    One thread observes. Any thread may ask at any time without a lock: `observe` swaps in
    finished curves that are never written again.
    """

    def __init__(self, quantile: float = QUANTILE, max_scopes: int = 1024) -> None:
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile is {quantile}; it lies between 0 and 1.")
        if max_scopes < 1:
            raise ValueError(f"max_scopes is {max_scopes}; at least one scope is remembered.")
        self._is_past_quantile = 1.0 - quantile
        self._max_scopes = max_scopes
        self._scopes: OrderedDict[str, _ScopeRecord] = OrderedDict()
        self._voices = np.zeros(_NUM_BUCKETS + 1)
        self._num_voices = 0.0
        self._prior_curve = _published(np.ones(_NUM_BUCKETS + 1))

    def expected_output(self, cache_scope: str, num_output_tokens: int, max_tokens: int) -> int:
        """How many output tokens the sequence will have had in the end, at the quantile.

        `num_output_tokens` it has already produced; the answer is conditional on that. It lies
        in num_output_tokens + 1 .. max_tokens, or is max_tokens where that is not more. What
        has never been seen to end is expected to reach max_tokens.
        """
        if num_output_tokens + 1 >= max_tokens:
            return max_tokens
        record = self._scopes.get(cache_scope)
        curve = self._prior_curve if record is None else record.curve
        alive = _share_alive(curve, num_output_tokens)
        if alive <= 0.0:
            return max_tokens
        target = -alive * self._is_past_quantile
        upper = bisect_left(curve, target)
        if upper > _NUM_BUCKETS:
            return max_tokens
        lower = upper - 1
        part = (target - curve[lower]) / (curve[upper] - curve[lower])
        start, end = _EDGE_LIST[lower], _EDGE_LIST[upper]
        length = ceil(start + part * (end - start))
        return min(max(length, num_output_tokens + 1), max_tokens)

    def observe(self, cache_scope: str, num_output_tokens: int, is_complete: bool) -> None:
        """Learn from a sequence that ended with so many tokens, of itself or (not) by a cut."""
        assert num_output_tokens >= 0, f"{num_output_tokens} output tokens"
        if num_output_tokens == 0 and not is_complete:
            return  # "at least nothing" says nothing
        record = self._scopes.get(cache_scope)
        if record is None:
            record = _ScopeRecord(self._prior_curve)
        else:
            self._silence(record)
        record.add(num_output_tokens, is_complete)
        record.voice = record.survival() * record.voice_weight
        self._voices += record.voice
        self._num_voices += record.voice_weight
        prior = self._prior()
        self._prior_curve = _published(prior)
        record.curve = _published(record.survival(prior, PRIOR_WEIGHT))
        self._scopes[cache_scope] = record
        self._scopes.move_to_end(cache_scope)
        if len(self._scopes) > self._max_scopes:
            self._silence(self._scopes.popitem(last=False)[1])

    def check(self) -> None:
        """No more scopes are remembered than may be, and the prior has exactly their voices."""
        records = self._scopes.values()
        assert len(records) <= self._max_scopes
        voices = sum((record.voice for record in records), np.zeros(_NUM_BUCKETS + 1))
        assert np.allclose(self._voices, voices, atol=1e-6)
        num_voices = sum(record.voice_weight for record in records)
        assert abs(self._num_voices - num_voices) < 1e-6

    def _silence(self, record: "_ScopeRecord") -> None:
        self._voices -= record.voice
        self._num_voices -= record.voice_weight

    def _prior(self) -> NDArray[np.float64]:
        num_absent = max(0.0, MIN_VOICES - self._num_voices)
        prior = (self._voices + num_absent) / (self._num_voices + num_absent)
        # Rounding must not bring an ended sequence back to life.
        return np.minimum.accumulate(np.clip(prior, 0.0, 1.0))


@dataclass(slots=True, eq=False)
class _ScopeRecord:
    """One scope's evidence, by bucket: how many got there, how many ended there.

    Who was cut inside a bucket counts for the part of it that he lived through.
    """

    curve: list[float]
    at_risk: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS))
    ended: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS))
    voice: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS + 1))
    weight: float = 0.0
    mean_rank: float = 0.5

    @property
    def voice_weight(self) -> float:
        """The say in the prior: 1 for a scope that has shown enough."""
        return min(1.0, self.weight / FULL_VOICE)

    def add(self, length: int, is_complete: bool) -> None:
        """Count one more sequence; those before it fade."""
        self._watch_for_drift(length, is_complete)
        self._fade(1.0 - 1.0 / MEMORY)
        self.weight += 1.0
        # A length beyond the last edge is known to be at least that edge.
        bucket = max(0, bisect_left(_EDGE_LIST, min(length, _LONGEST)) - 1)
        if is_complete and length <= _LONGEST:
            self.at_risk[: bucket + 1] += 1.0
            self.ended[bucket] += 1.0
        else:
            start, end = _EDGE_LIST[bucket], _EDGE_LIST[bucket + 1]
            self.at_risk[:bucket] += 1.0
            self.at_risk[bucket] += (min(length, _LONGEST) - start) / (end - start)

    def survival(
        self, prior: NDArray[np.float64] | None = None, prior_weight: float = 0.0
    ) -> NDArray[np.float64]:
        """The share that outlives each edge, own evidence mixed with that of the prior."""
        ended, at_risk = self.ended, self.at_risk
        if prior is not None:
            ended = ended + prior_weight * (prior[:-1] - prior[1:])
            at_risk = at_risk + prior_weight * prior[:-1]
        survival = np.ones(_NUM_BUCKETS + 1)
        # Nobody got there: nobody is known to end there. Faded counts round: at most all end.
        hazard = ended / np.maximum(at_risk, 1e-12)
        np.cumprod(1.0 - np.minimum(hazard, 1.0), out=survival[1:])
        return survival

    def _watch_for_drift(self, length: int, is_complete: bool) -> None:
        if self.weight < DRIFT_MIN_WEIGHT:
            return
        rank = 1.0 - _share_alive(self.curve, length)
        if not is_complete:
            rank = (1.0 + rank) / 2.0
        self.mean_rank += (rank - self.mean_rank) / DRIFT_MEMORY
        if abs(self.mean_rank - 0.5) > DRIFT_LIMIT:
            self._fade(WEIGHT_AFTER_DRIFT / self.weight)
            self.mean_rank = 0.5

    def _fade(self, factor: float) -> None:
        self.at_risk *= factor
        self.ended *= factor
        self.weight *= factor


def _published(survival: NDArray[np.float64]) -> list[float]:
    """The curve as readers want it: minus the share alive at each edge, which only rises."""
    published: list[float] = (-survival).tolist()
    return published


def _share_alive(curve: list[float], length: int) -> float:
    """Of all sequences, the share that becomes longer than `length`."""
    if length <= 0:
        return 1.0
    if length >= _LONGEST:
        return -curve[-1]
    upper = bisect_left(_EDGE_LIST, length)
    start, end = _EDGE_LIST[upper - 1], _EDGE_LIST[upper]
    part = (length - start) / (end - start)
    return -(curve[upper - 1] + part * (curve[upper] - curve[upper - 1]))
