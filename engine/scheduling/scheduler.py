"""Decides what to compute next.

A sequence has no phase. It owes tokens and has computed some of them; each step pays part of
the debt until the token budget is spent. Whoever owes a single token is paid first, so a long
prompt never stalls a sequence that is talking; then interactive before batch, oldest first.
Nothing here touches a tensor.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engine.kv_cache.kv_cache_manager import KVCacheManager, SequenceId
from engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step and the engine as a whole take on.

    `chunk_size` bounds the tokens of one sequence in one step, `max_num_batched_tokens` those
    of all sequences together, `max_num_seqs` how many run, `max_waiting` how many may wait.
    """

    max_num_batched_tokens: int
    chunk_size: int
    max_num_seqs: int
    max_waiting: int

    def __post_init__(self) -> None:
        for name in ("chunk_size", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running sequence one token."
            )


class Scheduler:
    """Holds the waiting and the running sequences; every living sequence is in exactly one."""

    def __init__(self, kv_cache: KVCacheManager, limits: SchedulerLimits) -> None:
        self._kv_cache = kv_cache
        self._limits = limits
        self._interactive: deque[Sequence] = deque()
        self._batch: deque[Sequence] = deque()
        self._running: dict[SequenceId, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold a block table."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not joined yet."""
        return len(self._interactive) + len(self._batch)

    def has_room_for(self, num_sequences: int) -> bool:
        """Whether this many more sequences may wait."""
        return self.num_waiting + num_sequences <= self._limits.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others of its class."""
        assert self._kv_cache.can_ever_fit(sequence.max_tokens), f"{sequence.id} never fits"
        (self._interactive if sequence.is_interactive else self._batch).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a living sequence, waiting or running; its blocks are free on return."""
        if self._running.pop(sequence.id, None) is not None:
            self._kv_cache.free(sequence.id)
        else:
            (self._interactive if sequence.is_interactive else self._batch).remove(sequence)

    def schedule(self) -> SchedulerOutput:
        """Let sequences join that fit, then spend one step's token budget."""
        self._admit()
        budget = self._limits.max_num_batched_tokens
        scheduled = []
        for sequence in self._in_order_of_payment():
            if budget == 0:
                break
            count = min(sequence.num_owed_tokens, self._limits.chunk_size, budget)
            budget -= count
            scheduled.append(self._pay(sequence, count))
        return SchedulerOutput(tuple(scheduled))

    def check(self) -> None:
        """Running sequences alone hold blocks, and no sequence is kept twice."""
        self._kv_cache.check(set(self._running))
        waiting = [sequence.id for sequence in (*self._interactive, *self._batch)]
        assert len({*waiting, *self._running}) == len(waiting) + len(self._running)
        assert len(self._running) <= self._limits.max_num_seqs
        assert all(sequence.num_owed_tokens > 0 for sequence in self._running.values())

    def _admit(self) -> None:
        # Strictly in order: a smaller one behind the head could overtake it for ever.
        for queue in (self._interactive, self._batch):
            while queue:
                if self.num_running == self._limits.max_num_seqs:
                    return
                if not self._kv_cache.try_admit(queue[0].id, queue[0].max_tokens):
                    return
                sequence = queue.popleft()
                self._running[sequence.id] = sequence

    def _in_order_of_payment(self) -> Iterator[Sequence]:
        # A stable sort: within one rank, those who joined first come first.
        def rank(sequence: Sequence) -> tuple[bool, bool]:
            return sequence.num_owed_tokens > 1, not sequence.is_interactive

        return iter(sorted(self._running.values(), key=rank))

    def _pay(self, sequence: Sequence, count: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        return ScheduledSequence(
            request_id=sequence.id.request_id,
            choice=sequence.id.choice,
            token_ids=tuple(sequence.token_ids[start : start + count]),
            start=start,
            block_table=self._kv_cache.allocate(sequence.id, start + count),
            is_sampled=count == sequence.num_owed_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
        )
