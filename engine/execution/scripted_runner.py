"""A model whose words are known beforehand: it says its prompt back, token by token, then EOS.

For demonstrations, load tests and tests of everything around the engine; it needs no weights
and no torch. What it knows of a sequence it reads back from its KV slots, so a wrong block
table, a reused block or a wrong move shows up as a wrong word. Asked for logprobs it is fairly
sure: a token's own is -0.5, and those with the next higher ids follow at -1.5, -2.5 and so on.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.runner import ModelLimits
from engine.interface.block_move import BlockMove, MoveKind
from engine.interface.token_logprobs import StepLogprobs, TokenLogprob
from engine.layers.step_layout import step_layout
from engine.scheduling.scheduler_output import SchedulerOutput


class ScriptedRunner:
    """A Runner that computes nothing. `delay_ms` is how long each step pretends to take."""

    def __init__(
        self,
        limits: ModelLimits,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        delay_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        # The token of every slot, [blocks, block_size]; NO_TOKEN where none was ever written.
        self._device = np.full((num_blocks, block_size), NO_TOKEN)
        self._host = np.full((num_host_blocks, block_size), NO_TOKEN)
        self._block_size = block_size
        self._delay_s = delay_ms / 1000
        self._sleep = sleep

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Store each token in its slot; answer sampled rows with the prompt's next token."""
        if self._delay_s > 0:
            self._sleep(self._delay_s)
        moves_s = self._move(work.moves) if work.moves else 0.0
        layout = step_layout(work.starts, work.counts, work.block_tables, self._block_size)
        self._device.reshape(-1)[layout.slots] = work.token_ids
        token_ids = np.where(work.is_sampled, self._next_words(work), NO_TOKEN)
        unwritten = np.flatnonzero(work.is_sampled & (token_ids == NO_TOKEN)).tolist()
        errors = dict.fromkeys(unwritten, "No token was ever written where the next word stands.")
        return ModelRunnerOutput(token_ids, errors, moves_s, self._logprobs(work, token_ids))

    def _logprobs(self, work: SchedulerOutput, token_ids: NDArray[np.int64]) -> StepLogprobs | None:
        sampled = {
            row: self._logprob(int(token_ids[row]), spec.sampling.logprobs)
            for row, spec in enumerate(work.specs)
            if spec.sampling.logprobs is not None and token_ids[row] != NO_TOKEN
        }
        prompt = {
            row: tuple(
                self._logprob(target, work.specs[row].sampling.prompt_logprobs or 0)
                for target in targets.tolist()
            )
            for row, targets in work.targets.items()
        }
        return StepLogprobs(sampled, prompt) if sampled or prompt else None

    def _logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        places = range(min(num_top, self.limits.vocab_size))
        top_ids = tuple((token_id + place) % self.limits.vocab_size for place in places)
        return TokenLogprob(-0.5, top_ids, tuple(-0.5 - place for place in places))

    def _next_words(self, work: SchedulerOutput) -> NDArray[np.int64]:
        lengths = np.array([spec.num_prompt_tokens for spec in work.specs], dtype=np.int64)
        num_said = work.ends - lengths
        is_over = num_said >= lengths
        # Rows that are over, or not to be sampled, read something that nobody looks at.
        place = np.where(is_over, 0, num_said.clip(min=0))
        blocks = work.block_tables[np.arange(work.num_rows), place // self._block_size]
        words = self._device[blocks, place % self._block_size]
        return np.where(is_over, min(self.limits.eos_token_ids), words)

    def _move(self, moves: Sequence[BlockMove]) -> float:
        began = time.perf_counter()
        for kind, source, destination in moves:
            origin = self._host if kind is MoveKind.LOAD else self._device
            target = self._host if kind is MoveKind.OFFLOAD else self._device
            target[destination] = origin[source]
        return time.perf_counter() - began
