"""A model whose words are known beforehand: it says its prompt back, token by token, then EOS.

For demonstrations, load tests and tests of everything around the engine; it needs no weights
and no torch. What it knows of a sequence it reads back from its KV slots, so a wrong block
table or a reused block shows up as a wrong word.
"""

import time
from collections.abc import Callable

from engine.execution.model_runner_output import ModelRunnerOutput, RowResult
from engine.execution.runner import ModelLimits
from engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput


class ScriptedRunner:
    """A Runner that computes nothing. `delay_ms` is how long each step pretends to take."""

    def __init__(
        self,
        limits: ModelLimits,
        num_slots: int,
        block_size: int,
        *,
        delay_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._slots = [-1] * num_slots
        self._block_size = block_size
        self._delay_s = delay_ms / 1000
        self._sleep = sleep

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Store each token in its slot; answer sampled rows with the prompt's next token."""
        if self._delay_s > 0:
            self._sleep(self._delay_s)
        return ModelRunnerOutput(tuple(self._row(sequence) for sequence in work.sequences))

    def _row(self, sequence: ScheduledSequence) -> RowResult:
        for position, token_id in enumerate(sequence.token_ids, sequence.start):
            self._slots[self._slot(sequence, position)] = token_id
        if not sequence.is_sampled:
            return RowResult()
        said = sequence.num_output_tokens
        if said < sequence.num_prompt_tokens:
            return RowResult(self._slots[self._slot(sequence, said)])
        return RowResult(min(self.limits.eos_token_ids))

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        block = sequence.block_table[position // self._block_size]
        return block * self._block_size + position % self._block_size
