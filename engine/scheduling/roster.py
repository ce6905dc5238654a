"""Who waits, who runs, and who changes places.

Every living sequence is in exactly one of two queues or runs. Interactive before batch class,
first come first served within a class; whoever loses its place returns to where it stood. Here
stands who joins and who goes, never what is computed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interface.sequence_update import SequenceEnd
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.admission import Admission, Predictor, must_be_guaranteed
from engine.scheduling.inter_token_controller import StepPlan
from engine.scheduling.running_table import RunningTable
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.scheduler_output import SequenceSpec
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue


class Yielding(NamedTuple):
    """What batch-class sequences would leave to an interactive one that they can be stopped for.

    `num_blocks` is how much lower the projection would be without them, at least.
    """

    num_sequences: int
    num_blocks: int


class Roster:
    """All living sequences. `running` is the table of those that have a place."""

    def __init__(
        self, kv_cache: KVCacheManager, limits: SchedulerLimits, predictor: Predictor
    ) -> None:
        self.running = RunningTable(limits.max_num_seqs, kv_cache.block_size)
        self.admission = Admission(kv_cache, predictor, limits.high_watermark, limits.low_watermark)
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._kv_cache = kv_cache
        self._max_waiting = limits.max_waiting
        self._predictor = predictor
        self._interactive = WaitingQueue()
        self._batch = WaitingQueue()
        self._living: dict[SequenceSpec, Sequence] = {}
        self._num_orders = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a block table."""
        return len(self.running)

    @property
    def num_projected_blocks(self) -> int:
        """The most blocks that the running sequences are expected to hold at once."""
        return self._growth().peak

    @property
    def yielding(self) -> Yielding:
        """How much of what runs gives way to interactive sequences."""
        running = self.running
        is_victim = self._can_be_stopped()
        if not is_victim.any():
            return Yielding(0, 0)
        others = np.flatnonzero(running.is_used & ~is_victim)
        num_held = int(running.capacity[is_victim].sum()) // self._kv_cache.block_size
        # Of what all share, the others share what is left if the victims share all that they hold.
        num_shared = max(0, self._kv_cache.num_shared_blocks - num_held)
        num_blocks = self.num_projected_blocks - running.growth(others, num_shared).peak
        return Yielding(int(is_victim.sum()), max(0, num_blocks))

    @property
    def num_interactive(self) -> int:
        """Of the running sequences, those that somebody reads."""
        running = self.running
        return int(running.is_interactive[running.is_used].sum())

    @property
    def num_waiting(self) -> int:
        """Sequences that have not joined yet, or have lost their place."""
        return len(self._interactive) + len(self._batch)

    def has_room_for(self, num_sequences: int) -> bool:
        """Whether this many more sequences may wait."""
        return self.num_waiting + num_sequences <= self._max_waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others of its class."""
        assert self._kv_cache.can_ever_fit(sequence.max_tokens), f"{sequence.spec} never fits"
        sequence.order = self._num_orders
        self._num_orders += 1
        self._living[sequence.spec] = sequence
        self._queue_of(sequence).add(sequence)

    def remove(self, sequence: Sequence, end: SequenceEnd, *, is_complete: bool = False) -> None:
        """Forget a living sequence, waiting or running; nobody holds its blocks on return.

        `is_complete` says that its output was all that was wanted, as the end STOP does.
        """
        del self._living[sequence.spec]
        if sequence in self.running:
            self._leave(sequence, is_trusted=end is not SequenceEnd.ERROR)
            self._predictor.observe(
                sequence.prefix.cache_scope,
                sequence.num_output_tokens,
                is_complete=is_complete or end is SequenceEnd.STOP,
            )
        else:
            self._queue_of(sequence).remove(sequence)
        if sequence.num_preemptions:
            self._kv_cache.give_up(sequence.prefix)

    def find(self, spec: SequenceSpec) -> Sequence | None:
        """The living sequence of this spec, waiting or running, or None."""
        return self._living.get(spec)

    def admit(self, plan: StepPlan) -> None:
        """Let sequences join that fit, in order, as far as the plan wants more to run."""
        # Strictly in order: a smaller one behind the head could overtake it for ever.
        running = self.running
        if self.admission.is_short:
            self.admission.note_projection(self._growth())
        while (sequence := self._interactive.head) is not None:
            num_interactive = int(running.is_interactive[running.is_used].sum())
            if sequence.is_pending or num_interactive >= plan.max_interactive:
                return
            if not self._may_join(sequence) and not self._make_way_for(sequence):
                return
            self._join(sequence)
        while (sequence := self._batch.head) is not None:
            if sequence.is_pending or not (plan.may_admit_batch or not self.num_running):
                return
            if must_be_guaranteed(sequence) and self._is_half_guaranteed_to_batch():
                return
            if not self._may_join(sequence):
                return
            self._join(sequence)

    def victim_for(self, slot: int) -> int | None:
        """Who ranks last, if that is behind the sequence that needs room."""
        running = self.running
        candidates = np.flatnonzero(running.is_used & ~running.is_guaranteed)
        if not running.is_guaranteed[slot]:
            candidates = candidates[running.rank[candidates] > running.rank[slot]]
        if not len(candidates):
            return None
        return int(candidates[np.argmax(running.rank[candidates])])

    def preempt(self, slot: int) -> None:
        """Take a place away; its sequence waits for another, before all that came later.

        Whatever the reason was, it counts towards MAX_PREEMPTIONS.
        """
        sequence = self.running.sequence(slot)
        assert not must_be_guaranteed(sequence), "a guaranteed sequence loses its place"
        running = self.running
        sequence.is_pending = bool(running.num_known[slot] > running.num_told[slot])
        is_untouched = bool(running.num_scheduled[slot] == running.num_computed[slot])
        if sequence.scheduled_at is None and is_untouched:
            # Nothing was computed with what it found, so it has found nothing.
            self.num_cached_tokens -= sequence.num_cached_tokens
            sequence.num_cached_tokens = 0
        self._leave(sequence, is_preempted=True)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._queue_of(sequence).put_back(sequence)

    def note_attached(self, slot: int, start: int, end: int) -> None:
        """KV from position `start` to `end` was found, and need not be computed."""
        running = self.running
        running.num_scheduled[slot] = running.num_computed[slot] = end
        running.see_blocks(slot)
        sequence = running.sequence(slot)
        if sequence.num_preemptions == 0 or sequence.scheduled_at is None:
            hit = max(0, min(end, sequence.spec.num_prompt_tokens) - start)
            sequence.num_cached_tokens += hit
            running.num_cached_tokens[slot] = sequence.num_cached_tokens
            self.num_cached_tokens += hit

    def check(self) -> None:
        """No sequence is kept twice, and everybody stands in order."""
        self.running.check()
        waiting = [*self._interactive, *self._batch]
        assert len(waiting) == len(set(waiting))
        assert not any(sequence in self.running for sequence in waiting)
        assert len(waiting) + len(self.running) == len(self._living)
        for queue in (self._interactive, self._batch):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders), "a queue is out of order"

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self._interactive if sequence.is_interactive else self._batch

    def _is_half_guaranteed_to_batch(self) -> bool:
        """Whether half of the places are held by batch-class sequences that nobody can stop."""
        running = self.running
        is_fixed = running.is_used & running.is_guaranteed & ~running.is_interactive
        return 2 * int(is_fixed.sum()) >= len(running.is_used)

    def _join(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)
        self.running.join(sequence, self.admission.open(sequence))

    def _growth(self) -> Growth:
        running = self.running
        slots = np.flatnonzero(running.is_used)
        return running.growth(slots, self._kv_cache.num_shared_blocks)

    def _may_join(self, sequence: Sequence) -> bool:
        return self.running.num_free > 0 and self.admission.may_join(sequence, self._growth())

    def _can_be_stopped(self) -> NDArray[np.bool_]:
        """By slot, whether its sequence makes way for an interactive one."""
        running = self.running
        return running.is_used & ~running.is_interactive & ~running.is_guaranteed

    def _make_way_for(self, sequence: Sequence) -> bool:
        """Stop batch-class sequences for an interactive one, if that is enough to let it join."""
        running = self.running
        is_victim = self._can_be_stopped()
        victims = np.flatnonzero(is_victim)
        if not len(victims):
            return False
        others = np.flatnonzero(running.is_used & ~is_victim)
        held = [block for slot in others.tolist() for block in running.table(slot).blocks]
        remaining = set(held)
        growth = running.growth(others, num_shared=len(held) - len(remaining))
        if not self.admission.may_join(sequence, growth, remaining):
            return False
        for slot in victims[np.argsort(-running.rank[victims])].tolist():
            self.preempt(slot)
            if self._may_join(sequence):
                return True
        return False

    def _leave(
        self, sequence: Sequence, *, is_preempted: bool = False, is_trusted: bool = True
    ) -> None:
        slot = self.running.slot_of(sequence)
        num_computed = int(self.running.num_computed[slot])
        table = self.running.leave(slot)
        self._kv_cache.close(table, num_computed, is_preempted=is_preempted, is_trusted=is_trusted)
