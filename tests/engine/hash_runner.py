"""A fake model whose next token is a hash of all tokens before it.

It reads those tokens back from its KV slots through the block table, so a wrong table, a
block given away too early or a token computed twice changes everything it says afterwards.
"""

import zlib

from engine.execution.model_runner_output import ModelRunnerOutput, RowResult
from engine.execution.runner import ModelLimits
from engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput

VOCAB_SIZE = 50
EOS = 0


class HashRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.limits = ModelLimits(VOCAB_SIZE, 10_000, frozenset({EOS}))
        self.steps: list[SchedulerOutput] = []
        self._block_size = block_size
        self._slots = [-1] * (num_blocks * block_size)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(work)
        written: set[int] = set()
        for sequence in work.sequences:
            slots = self._slots_of(sequence)[sequence.start :]
            assert not written & set(slots), "two sequences wrote one slot in one step"
            written |= set(slots)
            for slot, token_id in zip(slots, sequence.token_ids, strict=True):
                self._slots[slot] = token_id
        return ModelRunnerOutput(tuple(self._row(sequence) for sequence in work.sequences))

    def _row(self, sequence: ScheduledSequence) -> RowResult:
        if not sequence.is_sampled:
            return RowResult()
        context = [self._slots[slot] for slot in self._slots_of(sequence)]
        return RowResult(next_token(context, sequence.sampling.seed, sequence.choice))

    def _slots_of(self, sequence: ScheduledSequence) -> list[int]:
        return [
            sequence.block_table[position // self._block_size] * self._block_size
            + position % self._block_size
            for position in range(sequence.end)
        ]


def next_token(context: list[int], seed: int, choice: int) -> int:
    return zlib.crc32(repr((context, seed, choice)).encode()) % VOCAB_SIZE


def words_alone(
    prompt: tuple[int, ...], max_tokens: int, *, seed: int = 0, choice: int = 0
) -> list[int]:
    """What a request says when nothing else runs and nothing is scheduled at all."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context, seed, choice))
        if context[-1] == EOS:
            break
    return context[len(prompt) :]
