"""Sampling settings of the running sequences, laid out by slot.

A sequence keeps its slot and its settings from joining to leaving, so each step asks whole
arrays, and only a sequence that is new to its slot is looked at by itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.scheduler_output import SequenceSpec

# One row's settings; a temperature of 0 takes the likeliest. Before position `free_from` no token
# may end the output; a row is edited if its scores are biased or penalised; `num_top` is -1 where
# no logprobs are wanted.
SETTINGS = np.dtype(
    [
        ("seed", np.int64),
        ("choice", np.int64),
        ("free_from", np.int64),
        ("top_k", np.int64),
        ("num_top", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("is_edited", np.bool_),
    ]
)
Settings = NDArray[np.void]


class SamplingTable:
    """Remembers whose settings stand in which slot; a slot that changes hands is read anew."""

    def __init__(self) -> None:
        self._specs: list[SequenceSpec | None] = []
        self._settings = np.zeros(0, SETTINGS)

    def settings(self, specs: Sequence[SequenceSpec], slots: NDArray[np.int64]) -> Settings:
        """The settings of these sequences, one entry per row, in the order of `specs`."""
        missing = int(slots.max(initial=-1)) + 1 - len(self._specs)
        if missing > 0:
            self._specs += [None] * missing
            self._settings = np.concatenate((self._settings, np.zeros(missing, SETTINGS)))
        known = self._specs
        for slot, spec in zip(slots.tolist(), specs, strict=True):
            if known[slot] is not spec:
                known[slot] = spec
                self._settings[slot] = _settings_of(spec)
        settings: Settings = self._settings[slots]
        return settings


def _settings_of(spec: SequenceSpec) -> tuple[float, ...]:
    sampling = spec.sampling
    return (
        sampling.seed,
        spec.choice,
        spec.num_prompt_tokens + sampling.min_tokens,
        max(sampling.top_k, 0),
        -1 if sampling.logprobs is None else sampling.logprobs,
        0.0 if sampling.is_greedy else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        bool(sampling.logit_bias) or sampling.is_penalised,
    )
