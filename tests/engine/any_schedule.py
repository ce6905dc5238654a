"""One engine under any schedule: moves as plain values, and the judge of what came of them.

A schedule is `Sizes` and a list of moves, so whoever finds a bad one (chance or Hypothesis) can
print it, shorten it and play it again.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import InlineExecution
from engine.interface.block_move import MoveKind
from engine.interface.errors import InvalidRequest, QueueFull
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.prefix_keys import child_key
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from tests.engine.hash_runner import words_alone
from tests.engine.orders import NEVER, Transcript
from tests.engine.witness import MAX_PREEMPTIONS, Key, Witness

PREDICTORS = ("safe", "liar", "any")
MAX_IDLE_STEPS = 6
NORMAL_ENDS = {SequenceEnd.STOP, SequenceEnd.LENGTH}


@dataclass(frozen=True, slots=True)
class Sizes:
    """One engine; `step_s` and `move_s` are what a step and a block's move seem to take.

    A step in flight is computed when it is started (`is_eager`) or when it is finished.
    """

    block_size: int = 4
    num_blocks: int = 8
    num_host_blocks: int = 0
    chunk_size: int = 8
    max_num_seqs: int = 4
    spare_budget: int = 4
    max_waiting: int = 64
    predictor: str = "liar"
    key_bits: int = 128
    step_s: float = 0.001
    move_s: float = 0.0
    is_eager: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """A request arrives. `patience` is in steps; `faults` are (choice, position) that fail."""

    number: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 8
    n: int = 1
    seed: int = 0
    cache_scope: str = "a"
    is_batch: bool = False
    patience: float = NEVER
    num_resumed: tuple[int, ...] = ()
    faults: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody leaves; the request or choice need not be there."""

    number: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """So many steps of the simple or of the overlapped loop."""

    count: int
    is_overlapped: bool


Move = Join | Cancel | Steps


class AnySchedule:
    """Plays moves on an engine and raises AssertionError as soon as one law is broken."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.tally: Counter[str] = Counter()
        self.witness = Witness(sizes.num_blocks, sizes.block_size, sizes.num_host_blocks)
        self.witness.step_s = sizes.step_s
        self.witness.move_s = sizes.move_s
        self.engine = Engine(
            self.witness,
            EngineSettings(
                block_size=sizes.block_size,
                num_blocks=sizes.num_blocks,
                num_host_blocks=sizes.num_host_blocks,
                max_num_batched_tokens=sizes.max_num_seqs + sizes.spare_budget,
                chunk_size=sizes.chunk_size,
                max_num_seqs=sizes.max_num_seqs,
                max_waiting=sizes.max_waiting,
            ),
            execution=InlineExecution(self.witness, is_eager=sizes.is_eager),
            predictor=FixedPredictor(sizes.predictor),
            child_key=weak_child_key(sizes.key_bits),
            clock=lambda: self.witness.now,
            monotonic=lambda: self.witness.now,
        )
        self._requests: dict[str, GenerationRequest] = {}
        self._cancelled: set[Key] = set()
        self._transcript = Transcript()
        self._is_in_flight = False
        self._num_idle = 0
        self._overlaps_last = False

    def play(self, moves: Iterable[Move]) -> None:
        """Make all moves, then run to the end and judge."""
        for move in moves:
            self.apply(move)
        self.finish()

    def apply(self, move: Move) -> None:
        """Make one move; the engine's books must be right after it."""
        if isinstance(move, Join):
            self._join(move)
        elif isinstance(move, Cancel):
            self._cancel(move)
        else:
            for _ in range(move.count):
                self._step(is_overlapped=move.is_overlapped)
            self._overlaps_last = move.is_overlapped
            return
        self.engine.check()

    def finish(self) -> None:
        """Run until nothing is left, in the loop that was used last."""
        owed = sum(len(story.token_ids) for story in self.witness.stories.values())
        most = 100 + self.witness.num_steps + owed * (2 + MAX_PREEMPTIONS)
        while self.engine.has_work:
            self._step(is_overlapped=self._overlaps_last)
            assert self.witness.num_steps < most, "the engine works without getting on"
        self._judge_books()
        for request in self._requests.values():
            for choice in range(request.num_choices):
                self._judge(request, choice)
        self._count()

    def _join(self, join: Join) -> None:
        request = self._request(join)
        if request.request_id in self._requests:
            return
        longest = max(map(len, join.prompts)) + join.max_tokens
        try:
            self.witness.expect(request, join.faults)
            self.engine.add(request)
        except InvalidRequest:
            # It may keep one block in hand, but what fits beside that is served.
            assert longest > (self.sizes.num_blocks - 1) * self.sizes.block_size
        except QueueFull:
            waiting = self.engine.stats().waiting
            assert waiting + request.num_choices > self.sizes.max_waiting
            self.tally["refused"] += 1
        else:
            assert longest <= self.sizes.num_blocks * self.sizes.block_size
            self._requests[request.request_id] = request

    def _request(self, join: Join) -> GenerationRequest:
        num_choices = len(join.prompts) * join.n
        resumed = []
        for choice, count in zip(range(num_choices), join.num_resumed, strict=False):
            prompt = join.prompts[choice // join.n]
            words = words_alone(prompt, join.max_tokens, seed=join.seed, choice=choice)
            resumed.append(tuple(words[:count]))
        return GenerationRequest(
            request_id=f"r{join.number}",
            prompts=join.prompts,
            sampling=SamplingParams(max_tokens=join.max_tokens, n=join.n, seed=join.seed),
            priority_class=PriorityClass.BATCH if join.is_batch else PriorityClass.INTERACTIVE,
            cache_scope=join.cache_scope,
            arrival=self.witness.now,
            deadline_at=self.witness.now + join.patience * self.sizes.step_s,
            resumed=(*resumed, *((),) * (num_choices - len(resumed))) if resumed else (),
        )

    def _cancel(self, cancel: Cancel) -> None:
        request = self._requests.get(f"r{cancel.number}")
        self.engine.cancel(f"r{cancel.number}", cancel.choice)
        for choice in range(request.num_choices if request else 0):
            key = f"r{cancel.number}", choice
            if cancel.choice in (None, choice) and key not in self._transcript.ends:
                self._cancelled.add(key)
                self.witness.is_over(key)

    def _step(self, *, is_overlapped: bool) -> None:
        before = self.witness.num_steps, self.witness.num_sampled
        self.witness.now += self.sizes.step_s / 8
        updates = self.engine.step_overlapped() if is_overlapped else self.engine.step()
        self._transcript.note(updates)
        for update in updates:
            self._judge_update(update)
        num_new = sum(len(update.token_ids) for update in updates)
        if not is_overlapped and not self._is_in_flight:
            sampled = self.witness.num_sampled - before[1]
            assert num_new == sampled, f"{sampled} rows were sampled, {num_new} tokens came out"
        self._is_in_flight = is_overlapped
        is_idle = not updates and self.witness.num_steps == before[0]
        self._num_idle = self._num_idle + 1 if is_idle and self.engine.has_work else 0
        assert self._num_idle < MAX_IDLE_STEPS, "the engine has work and does nothing"
        self.engine.check()

    def _judge_update(self, update: SequenceUpdate) -> None:
        key = update.request_id, update.choice
        story = self.witness.stories[key]
        assert 0 <= update.num_cached_tokens <= story.num_prompt_tokens
        if update.end is None:
            return
        self.witness.is_over(key)
        if update.end is SequenceEnd.CANCELLED:
            assert key in self._cancelled, f"nobody cancelled {key}"
        elif update.end is SequenceEnd.DEADLINE:
            assert self._requests[key[0]].deadline_at <= self.witness.now, f"{key} had time"
        elif update.end is SequenceEnd.ERROR:
            assert story.has_failed, f"{key} suffers for another: {update.message}"
        else:
            # The KV of the last token is computed in vain, if at all: it may fail.
            is_in_vain = bool(story.rows) and story.rows[-1][0] == len(story.token_ids) - 1
            assert not story.has_failed or is_in_vain, f"{key} failed and ends as {update.end}"

    def _judge_books(self) -> None:
        stats = self.engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total == self.sizes.num_blocks
        assert (stats.running, stats.waiting) == (0, 0)
        assert 0 <= stats.host_blocks_free <= self.sizes.num_host_blocks
        assert stats.cached_tokens_total == sum(self._transcript.num_cached_tokens.values())
        comebacks = sum(story.num_comebacks for story in self.witness.stories.values())
        assert comebacks <= stats.preemptions_total

    def _judge(self, request: GenerationRequest, choice: int) -> None:
        key = request.request_id, choice
        story = self.witness.stories[key]
        said = [*request.resumed_of(choice), *self._transcript.token_ids[key]]
        alone = story.token_ids[story.num_prompt_tokens :]
        assert key in self._transcript.ends, f"{key} never ended"
        if self._transcript.ends[key] in NORMAL_ENDS:
            assert said == alone, f"{key} said {said} and alone {alone}"
            self._judge_effort(key)
        else:
            assert said == alone[: len(said)], f"{key} said {said} and alone {alone}"

    def _judge_effort(self, key: Key) -> None:
        """Who kept his place computed each token once, but for the prompt tokens found."""
        story = self.witness.stories[key]
        if story.num_comebacks or not story.rows:
            return
        assert not story.num_tokens_twice, f"{key} computed tokens twice: {story.rows}"
        length = story.num_prompt_tokens
        computed = sum(min(end, length) - min(start, length) for start, end in story.rows)
        cached = self._transcript.num_cached_tokens[key]
        # Who lost his place before his first row came back unseen, and found other tokens then.
        comebacks = sum(story.num_comebacks for story in self.witness.stories.values())
        is_seen = comebacks == self.engine.stats().preemptions_total
        found = length - computed
        assert cached == found or not is_seen, (
            f"{key} is said to have found {cached} and computed {story.rows}"
        )

    def _count(self) -> None:
        """What happened, for whoever asks whether these schedules are wild enough."""
        stats, tally = self.engine.stats(), self.tally
        stories = self.witness.stories.values()
        tally["steps"] += self.witness.num_steps
        tally["sequences"] += len(stories)
        tally["preemptions"] += stats.preemptions_total
        tally["offloaded"] += self.witness.num_moves[MoveKind.OFFLOAD]
        tally["loaded"] += self.witness.num_moves[MoveKind.LOAD]
        tally["copied"] += self.witness.num_moves[MoveKind.COPY]
        tally["cached_tokens"] += stats.cached_tokens_total
        tally["recomputed_tokens"] += sum(story.num_tokens_twice for story in stories)
        tally["thrice_preempted"] += sum(
            story.num_comebacks == MAX_PREEMPTIONS for story in stories
        )
        starts = [story.rows[0][0] for story in stories if story.rows]
        tally["hits"] += sum(start > 0 for start in starts)
        tally["partial_hits"] += sum(start % self.sizes.block_size > 0 for start in starts)
        tally["failed"] += sum(story.has_failed for story in stories)
        for end in self._transcript.ends.values():
            tally[end.value] += 1


class FixedPredictor:
    """Expects all that may come ("safe"), hardly anything ("liar"), or anything, always alike."""

    def __init__(self, name: str) -> None:
        assert name in PREDICTORS
        self._name = name

    def expected_output(self, cache_scope: str, num_output_tokens: int, max_tokens: int) -> int:
        if self._name == "safe":
            return max_tokens
        if self._name == "liar":
            return min(max_tokens, num_output_tokens + 1)
        chance = zlib.crc32(f"{cache_scope} {num_output_tokens} {max_tokens}".encode()) % 12
        return min(max_tokens, num_output_tokens + 1 + chance)

    def observe(self, cache_scope: str, num_output_tokens: int, is_complete: bool) -> None:
        """It has made up its mind."""


def weak_child_key(num_bits: int) -> Callable[[bytes, Sequence[int]], bytes]:
    """The keys of prefixes, cut to so few bits that different prefixes have one name."""

    mask = (1 << num_bits) - 1

    def key(parent: bytes, token_ids: Sequence[int]) -> bytes:
        strong = int.from_bytes(child_key(parent, token_ids), "big")
        return (strong & mask).to_bytes(len(parent), "big")

    return key
