"""A fake model whose next token is a hash of all tokens before it.

It reads those tokens back from its KV slots through the block table, so a wrong table, a
block given away too early, a wrong move or a token computed twice changes everything it says
afterwards. It also holds every step to the laws that a real model could not notice broken.
"""

import zlib
from collections.abc import Iterable

import numpy as np

from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.runner import ModelLimits
from engine.interface.block_move import BlockMove, MoveKind
from engine.scheduling.scheduler_output import (
    PENDING,
    ScheduledSequence,
    SchedulerOutput,
    SequenceSpec,
)

VOCAB_SIZE = 50
EOS = 0
FAULT = "An injected fault."

# What a slot holds instead of a token: nothing yet, or what a failed row left behind.
NEVER_WRITTEN = -1
WIPED = -2

Fault = tuple[str, int, int]
Name = tuple[int, int]


class HashRunner:
    """A row that computes (request_id, choice, position) of `faults` fails, as a NaN row does.

    `faults` may be changed between steps; `steps` are all that were executed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        faults: Iterable[Fault] = (),
    ) -> None:
        self.limits = ModelLimits(VOCAB_SIZE, 10_000, frozenset({EOS}))
        self.steps: list[SchedulerOutput] = []
        self.faults = set(faults)
        self._block_size = block_size
        self._device = [NEVER_WRITTEN] * (num_blocks * block_size)
        self._host = [NEVER_WRITTEN] * (num_host_blocks * block_size)
        # Sequences by (slot, epoch): who they are, and the step in which they failed.
        self._specs: dict[Name, SequenceSpec] = {}
        self._failed_in: dict[Name, int] = {}

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(work)
        for move in work.moves:
            self._move(move)
        names = list(zip(work.slots.tolist(), work.epochs.tolist(), strict=True))
        self._check_names(work, names)
        sequences = work.sequences(self._block_size)
        slots = [self._slots_of(sequence) for sequence in sequences]
        self._check_slots(sequences, slots)
        for name, sequence, own in zip(names, sequences, slots, strict=True):
            for slot, token_id in zip(own[sequence.start :], sequence.token_ids, strict=True):
                self._device[slot] = WIPED if name in self._failed_in else token_id
        token_ids, errors = [], {}
        for row, sequence in enumerate(sequences):
            error = self._trouble(names[row], sequence, slots[row])
            if error is not None:
                errors[row] = error
                self._failed_in.setdefault(names[row], len(self.steps))
                for slot in slots[row][sequence.start :]:
                    self._device[slot] = WIPED
            is_answered = sequence.is_sampled and error is None
            token_ids.append(self._answer(sequence, slots[row]) if is_answered else NO_TOKEN)
        return ModelRunnerOutput(np.array(token_ids, dtype=np.int64), errors)

    def _move(self, move: BlockMove) -> None:
        origin = self._host if move.kind is MoveKind.LOAD else self._device
        target = self._host if move.kind is MoveKind.OFFLOAD else self._device
        content = self._block(origin, move.source)
        assert any(word != NEVER_WRITTEN for word in content), f"{move} moves an empty block"
        assert len(self._block(target, move.destination)) == self._block_size
        first = move.destination * self._block_size
        target[first : first + self._block_size] = content

    def _block(self, slots: list[int], block: int) -> list[int]:
        content = slots[block * self._block_size : (block + 1) * self._block_size]
        assert len(content) == self._block_size, f"there is no block {block}"
        return content

    def _check_names(self, work: SchedulerOutput, names: list[Name]) -> None:
        assert len({slot for slot, _ in names}) == len(names), "two rows have one slot"
        for name, spec in zip(names, work.specs, strict=True):
            assert self._specs.setdefault(name, spec) is spec, f"{name} changed its spec"
            failed_in = self._failed_in.get(name, len(self.steps) - 1)
            assert failed_in == len(self.steps) - 1, f"{spec} is still computed after it failed"

    def _check_slots(
        self, sequences: tuple[ScheduledSequence, ...], slots: list[list[int]]
    ) -> None:
        writers: dict[int, int] = {}
        for row, (sequence, own) in enumerate(zip(sequences, slots, strict=True)):
            assert sequence.token_ids, f"{sequence} computes nothing"
            assert len(own) == len(set(own)), f"{sequence} has a block twice"
            for slot in own[sequence.start :]:
                assert slot not in writers, f"two rows write slot {slot} in one step"
                writers[slot] = row
        for row, own in enumerate(slots):
            for slot in own:
                assert writers.get(slot, row) == row, f"a row reads slot {slot}, another writes it"

    def _trouble(self, name: Name, sequence: ScheduledSequence, own: list[int]) -> str | None:
        has_failed = name in self._failed_in
        assert PENDING not in sequence.token_ids, f"{sequence} waits for a token"
        context = [self._device[slot] for slot in own]
        assert NEVER_WRITTEN not in context, f"{sequence} reads a slot that was never written"
        assert WIPED not in context or has_failed, f"{sequence} reads what a failed row left"
        positions = range(sequence.start, sequence.end)
        is_faulty = any((sequence.request_id, sequence.choice, p) in self.faults for p in positions)
        return FAULT if is_faulty else None

    def _answer(self, sequence: ScheduledSequence, own: list[int]) -> int:
        context = [self._device[slot] for slot in own]
        return next_token(context, sequence.sampling.seed, sequence.choice)

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
