"""A runner that knows what every KV slot should hold, and sees at once when a row reads another.

The KV of a real token depends on the scope's weights and on every token before it, so a slot's
content has a name made of all those. The witness keeps the names beside the slots, moves them
with the blocks, and compares before any row is believed: a block of another scope, of a
look-alike prefix, of a sequence that failed, or not yet written cannot pass for the right one,
even where the tokens are equal.
"""

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.runner import ModelLimits
from engine.interface.block_move import MoveKind
from engine.interface.generation_request import GenerationRequest
from engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from tests.engine.hash_runner import HashRunner, words_alone

Key = tuple[str, int]
Block = list[tuple[int, Key | None]]

UNWRITTEN = (-1, None)
SPOILT = (-3, None)
# A step may be in flight when the engine learns that a sequence is over.
MAX_LATE_STEPS = 1
MAX_PREEMPTIONS = 3


@dataclass(slots=True)
class Story:
    """One choice as it must go: all its tokens, and the name of the KV at each position.

    `over_since` is the number of steps executed when the engine was told, or told us, that the
    choice is over. `places` are the (slot, epoch) that it had, `rows` the (start, end) that
    were computed.
    """

    token_ids: list[int]
    names: list[int]
    num_prompt_tokens: int
    has_failed: bool = False
    over_since: int | None = None
    places: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_comebacks(self) -> int:
        """How often it was preempted and came back, as far as its rows show."""
        return max(0, len(self.places) - 1)

    @property
    def num_tokens_twice(self) -> int:
        """Tokens computed again after a preemption."""
        return sum(max(0, end - start) for (_, end), (start, _) in pairwise(self.rows))


class Witness:
    """A HashRunner, and a clock `now` on which a step and a block's move take their seconds."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._runner = HashRunner(num_blocks, block_size, num_host_blocks)
        self.limits: ModelLimits = self._runner.limits
        self.now = 0.0
        self.step_s = 0.0
        self.move_s = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_sampled = 0
        self.num_moves: Counter[MoveKind] = Counter()
        self.stories: dict[Key, Story] = {}
        self._block_size = block_size
        self._device: list[Block] = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._host: list[Block] = [[UNWRITTEN] * block_size for _ in range(num_host_blocks)]
        self._holders: dict[tuple[int, int], Key] = {}

    def expect(self, request: GenerationRequest, faults: Iterable[tuple[int, int]] = ()) -> None:
        """Learn a request before the engine sees it; `faults` are (choice, position) that fail."""
        for choice, position in faults:
            self._runner.faults.add((request.request_id, choice, position))
        sampling = request.sampling
        for choice in range(request.num_choices):
            prompt = request.prompt_of(choice)
            words = words_alone(prompt, sampling.max_tokens, seed=sampling.seed, choice=choice)
            token_ids = [*prompt, *words]
            self.stories[request.request_id, choice] = Story(
                token_ids,
                _names(request.cache_scope, token_ids),
                len(prompt),
            )

    def is_over(self, key: Key) -> None:
        """The sequence was cancelled, or the engine reported its end: it may not run on."""
        story = self.stories[key]
        if story.over_since is None:
            story.over_since = self.num_steps

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self.now += self.step_s
        self.num_steps += 1
        for move in work.moves:
            self._move(move.kind, move.source, move.destination)
        rows = work.sequences(self._block_size)
        self._check_places(work, rows)
        result = self._runner.execute(work)
        for failed in result.errors:
            self.stories[_key(rows[failed])].has_failed = True
        self._write(rows)
        for row in rows:
            self._check_row(row)
        self.num_tokens += work.num_tokens
        self.num_sampled += int((result.token_ids != NO_TOKEN).sum())
        moves_s = self.move_s * len(work.moves)
        self.now += moves_s
        return replace(result, moves_s=moves_s)

    def _move(self, kind: MoveKind, source: int, destination: int) -> None:
        self.num_moves[kind] += 1
        from_host, to_host = kind is MoveKind.LOAD, kind is MoveKind.OFFLOAD
        content = (self._host if from_host else self._device)[source]
        (self._host if to_host else self._device)[destination] = list(content)

    def _check_places(self, work: SchedulerOutput, rows: tuple[ScheduledSequence, ...]) -> None:
        keys = [_key(row) for row in rows]
        assert len(set(keys)) == len(keys), "a sequence has two rows in one step"
        for key, slot, epoch in zip(keys, work.slots.tolist(), work.epochs.tolist(), strict=True):
            holder = self._holders.setdefault((slot, epoch), key)
            assert holder == key, f"{key} has the slot and epoch that {holder} had"
            story = self.stories[key]
            if (slot, epoch) not in story.places:
                story.places.append((slot, epoch))
            assert story.num_comebacks <= MAX_PREEMPTIONS, f"{key} was preempted too often"

    def _write(self, rows: tuple[ScheduledSequence, ...]) -> None:
        for row in rows:
            story, key = self.stories[_key(row)], _key(row)
            for position in range(row.start, row.end):
                block = self._device[row.block_table[position // self._block_size]]
                content = SPOILT if story.has_failed else (story.names[position], key)
                block[position % self._block_size] = content

    def _check_row(self, row: ScheduledSequence) -> None:
        key = _key(row)
        story = self.stories[key]
        if story.over_since is not None:
            late = self.num_steps - story.over_since
            assert late <= MAX_LATE_STEPS, f"{key} is computed {late} steps after its end"
        story.rows.append((row.start, row.end))
        if story.has_failed:
            return
        assert row.token_ids == tuple(story.token_ids[row.start : row.end]), (
            f"{key} computes {row.token_ids} at {row.start}, not what it said"
        )
        content = [slot for block in row.block_table for slot in self._device[block]][: row.end]
        names = [name for name, _ in content]
        if names != story.names[: row.end]:
            wrong = next(p for p in range(row.end) if names[p] != story.names[p])
            raise AssertionError(
                f"{key} reads at position {wrong} of {row.start}..{row.end} (blocks "
                f"{row.block_table}) the KV of {self._whose(content[wrong])}"
            )

    def _whose(self, content: tuple[int, Key | None]) -> str:
        if content == UNWRITTEN:
            return "nobody: it was never written"
        if content == SPOILT:
            return "a row that failed"
        at = self.stories[content[1]].names.index(content[0]) if content[1] else -1
        return f"{content[1]} at its position {at}"


def _key(row: ScheduledSequence) -> Key:
    return row.request_id, row.choice


def _names(cache_scope: str, token_ids: list[int]) -> list[int]:
    name = zlib.crc32(cache_scope.encode())
    names = []
    for token_id in token_ids:
        name = abs(hash((name, token_id)))
        names.append(name)
    return names
