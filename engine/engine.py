"""The engine: requests in, tokens out, one step at a time.

    schedule() -> execute() -> record()

It owns no thread, no queue and no text. Every sequence gets exactly one update with an `end`:
finished, cancelled, past its deadline, or failed alone.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.execution.model_runner_output import RowResult
from engine.execution.runner import ModelLimits, Runner
from engine.interface.errors import DuplicateRequest, InvalidRequest, QueueFull
from engine.interface.generation_request import GenerationRequest
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduling.scheduler import Scheduler, SchedulerLimits
from engine.scheduling.scheduler_output import ScheduledSequence
from engine.scheduling.sequence import Sequence, sequences_of


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one engine. The first two shape the KV cache, the rest is SchedulerLimits.

    Runner and engine must be built with the same `block_size` and `num_blocks`.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_num_batched_tokens: int = 128
    chunk_size: int = 64
    max_num_seqs: int = 32
    max_waiting: int = 1024


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine says of itself between two steps."""

    kv_blocks_free: int
    kv_blocks_total: int
    projected_free_tokens: int
    running: int
    waiting: int
    max_num_seqs: int
    steps_total: int
    late_cancels_total: int


class Engine:
    """Continuous batching over any Runner.

    `clock` is the clock of `request.deadline_at`; it is read once per request, and from then
    on `monotonic` counts, so a jump of the wall clock ends nothing.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._kv_cache = KVCacheManager(settings.num_blocks, settings.block_size)
        self._scheduler = Scheduler(
            self._kv_cache,
            SchedulerLimits(
                settings.max_num_batched_tokens,
                settings.chunk_size,
                settings.max_num_seqs,
                settings.max_waiting,
            ),
        )
        self._living: dict[str, dict[int, Sequence]] = {}
        self._ended: list[SequenceUpdate] = []
        self._steps_total = 0
        self._late_cancels_total = 0

    @property
    def settings(self) -> EngineSettings:
        """The sizes that this engine was built with."""
        return self._settings

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model that runs here."""
        return self._runner.limits

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._living or self._ended)

    def add(self, request: GenerationRequest) -> None:
        """Queue all choices of a request, or raise and queue none.

        Raises InvalidRequest when it can never run here, QueueFull when it cannot wait, and
        DuplicateRequest when it is already here.
        """
        self._validate(request)
        if request.request_id in self._living:
            raise DuplicateRequest(f"Request {request.request_id} is already running here.")
        if not self._scheduler.has_room_for(request.num_choices):
            raise QueueFull(
                f"{self._scheduler.num_waiting} sequences wait and at most "
                f"{self._settings.max_waiting} may; send the request elsewhere or later."
            )
        deadline = self._monotonic() + (request.deadline_at - self._clock())
        sequences = sequences_of(request, self.limits.eos_token_ids, deadline)
        self._living[request.request_id] = {sequence.id.choice: sequence for sequence in sequences}
        for sequence in sequences:
            self._scheduler.add(sequence)
            # What an earlier attempt delivered may already be all there was to say.
            if sequence.end is not None:
                self._end(sequence, sequence.end)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Stop one choice, or all; their blocks are free on return, the next step reports it.

        A request or choice that is not here has ended before: counted, otherwise ignored.
        """
        living = self._living.get(request_id, {})
        targets = list(living.values()) if choice is None else [living.get(choice)]
        found = [sequence for sequence in targets if sequence is not None]
        if not found:
            self._late_cancels_total += 1
        for sequence in found:
            self._end(sequence, SequenceEnd.CANCELLED)

    def step(self) -> list[SequenceUpdate]:
        """Compute one step; return what was sampled and what ended since the last one."""
        now = self._monotonic()
        for sequence in list(self._all_living()):
            if sequence.deadline <= now:
                self._end(sequence, SequenceEnd.DEADLINE)
        updates, self._ended = self._ended, []
        work = self._scheduler.schedule()
        if not work.sequences:
            return updates
        result = self._runner.execute(work)
        self._steps_total += 1
        for scheduled, row in zip(work.sequences, result.rows, strict=True):
            update = self._record(scheduled, row, now)
            if update is not None:
                updates.append(update)
        return updates

    def stats(self) -> EngineStats:
        """A consistent picture; call it from the thread that steps."""
        return EngineStats(
            kv_blocks_free=self._kv_cache.num_free_blocks,
            kv_blocks_total=self._kv_cache.num_blocks,
            projected_free_tokens=self._kv_cache.num_projected_free_tokens,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            max_num_seqs=self._settings.max_num_seqs,
            steps_total=self._steps_total,
            late_cancels_total=self._late_cancels_total,
        )

    def check(self) -> None:
        """Every living sequence is either waiting or running, and the books of both agree."""
        self._scheduler.check()
        num_living = sum(1 for _ in self._all_living())
        assert num_living == self._scheduler.num_running + self._scheduler.num_waiting
        assert all(self._living.values()), "a request without living sequences is kept"

    def _validate(self, request: GenerationRequest) -> None:
        request.validate(self.limits.vocab_size, self.limits.max_model_len)
        max_tokens = request.sampling.max_tokens
        for tokens in request.resumed:
            if len(tokens) > max_tokens or not all(
                0 <= token_id < self.limits.vocab_size for token_id in tokens
            ):
                raise InvalidRequest(
                    f"Resumed tokens must lie in [0, {self.limits.vocab_size}) and be at most "
                    f"{max_tokens} (max_tokens).",
                    param="resumed",
                )
        longest = max(len(prompt) for prompt in request.prompts) + max_tokens
        if not self._kv_cache.can_ever_fit(longest):
            slots = self._settings.num_blocks * self._settings.block_size
            raise InvalidRequest(
                f"One choice can come to {longest} tokens with its prompt; the KV cache here "
                f"holds {slots}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _record(
        self, scheduled: ScheduledSequence, row: RowResult, now: float
    ) -> SequenceUpdate | None:
        sequence = self._living[scheduled.request_id][scheduled.choice]
        sequence.num_computed_tokens += len(scheduled.token_ids)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        if row.error is not None:
            self._forget(sequence)
            return _update(sequence, end=SequenceEnd.ERROR, message=row.error)
        if not scheduled.is_sampled:
            return None
        assert row.token_id is not None, f"{sequence.id} was sampled and got no token"
        sequence.token_ids.append(row.token_id)
        end = sequence.end
        if end is not None:
            self._forget(sequence)
        return _update(sequence, token_ids=(row.token_id,), end=end)

    def _end(self, sequence: Sequence, end: SequenceEnd) -> None:
        self._forget(sequence)
        self._ended.append(_update(sequence, end=end))

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        choices = self._living[sequence.id.request_id]
        del choices[sequence.id.choice]
        if not choices:
            del self._living[sequence.id.request_id]

    def _all_living(self) -> Iterator[Sequence]:
        return (sequence for choices in self._living.values() for sequence in choices.values())


def _update(
    sequence: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    end: SequenceEnd | None = None,
    message: str = "",
) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=sequence.id.request_id,
        choice=sequence.id.choice,
        token_ids=token_ids,
        end=end,
        scheduled_at=sequence.scheduled_at,
        message=message,
    )
