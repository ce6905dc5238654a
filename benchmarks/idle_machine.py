"""A Runner that computes nothing, for measurements of everything around it."""

import time
from math import inf

import numpy as np

from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.runner import ModelLimits
from engine.scheduling.scheduler_output import SchedulerOutput

VOCAB_SIZE = 50_000
EOS = 0


class IdleMachine:
    """Says any words, on a clock that only its steps move; outputs end by chance.

    `wall_s` and `thread_s` are what answering took, by the wall and of this thread's time, and
    `num_prompt_tokens` those of prompts that a model would have computed; anybody may reset them.
    """

    def __init__(self, seed: int, mean_output_tokens: float = inf) -> None:
        self.limits = ModelLimits(VOCAB_SIZE, 32_768, frozenset({EOS}))
        self.wall_s = self.thread_s = 0.0
        self.num_prompt_tokens = 0
        self._random = np.random.default_rng(seed)
        self._end_share = 1.0 / mean_output_tokens
        self._now = 0.0

    def clock(self) -> float:
        """Seconds since the first step, had the steps been computed by an 8B model on a GPU."""
        return self._now

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Answer at once, and note what answering took."""
        wall, thread = time.perf_counter(), time.thread_time()
        moves_s = 20e-6 * len(work.moves)
        self._now += 8e-3 + 20e-6 * work.num_tokens + 30e-9 * float(work.ends.sum()) + moves_s
        lengths = np.array([spec.num_prompt_tokens for spec in work.specs], np.int64)
        self.num_prompt_tokens += int((np.minimum(work.ends, lengths) - work.starts).clip(0).sum())
        words = self._random.integers(1, VOCAB_SIZE, work.num_rows)
        words[self._random.random(work.num_rows) < self._end_share] = EOS
        result = ModelRunnerOutput(np.where(work.is_sampled, words, NO_TOKEN), moves_s=moves_s)
        self.thread_s += time.thread_time() - thread
        self.wall_s += time.perf_counter() - wall
        return result
