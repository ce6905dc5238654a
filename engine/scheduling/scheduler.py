"""Decides what to compute next, and records what came of it.

A sequence has no phase. Some of its tokens have KV and the others are owed; each step pays
part of the debt. Whoever owes a single token is talking and is paid first; what is left of
the step, as the inter-token controller measures it out, goes to prompts in chunks.

Sequences join by projected KV. A projection can be wrong: when blocks run out, those who rank
last lose their place (batch class before interactive, youngest first), at most three times
each, and find their KV again when they return. Nothing here touches a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.interface.token_logprobs import StepLogprobs, TokenLogprob
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.admission import Admission, Predictor, must_be_guaranteed
from engine.scheduling.chunks import service_order
from engine.scheduling.inter_token_controller import InterTokenController, StepDemand, StepPlan
from engine.scheduling.prefix_claims import PrefixClaims
from engine.scheduling.running_table import RunningTable
from engine.scheduling.scheduler_output import PENDING, SchedulerOutput, SequenceSpec
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue

Slots = NDArray[np.int64]

# What a named tuple's own constructor ends in, without a call of Python's on the way.
_new_tuple = tuple.__new__
# Prompts looked at in a step beyond those that it has tokens for: they wait for others' blocks.
MAX_LOOKS = 64


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


class _Outcome(NamedTuple):
    """What one row's computation means for its sequence, when it is not simply one more token."""

    token_id: int | None
    error: str | None
    logprob: TokenLogprob | None = None
    scores: tuple[TokenLogprob, ...] = ()


class Scheduler:
    """Holds the waiting and the running sequences; every living sequence is in exactly one."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: SchedulerLimits,
        predictor: Predictor,
        controller: InterTokenController,
    ) -> None:
        self._kv_cache = kv_cache
        self._limits = limits
        self._predictor = predictor
        self._controller = controller
        self._admission = Admission(kv_cache, predictor)
        self._interactive = WaitingQueue()
        self._batch = WaitingQueue()
        self._running = RunningTable(limits.max_num_seqs, kv_cache.block_size)
        self._living: dict[SequenceSpec, Sequence] = {}
        self._claims = PrefixClaims(kv_cache.block_size)
        self._plan = StepPlan(0, 0, max_interactive=limits.max_num_seqs, may_admit_batch=True)
        self._num_orders = 0
        self._num_steps = 0
        self.num_preemptions = 0
        self.num_late_rows = 0
        self.num_cached_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a block table."""
        return len(self._running)

    @property
    def num_projected_blocks(self) -> int:
        """The most blocks that the running sequences are expected to hold at once."""
        return self._growth().peak

    @property
    def num_waiting(self) -> int:
        """Sequences that have not joined yet, or have lost their place."""
        return len(self._interactive) + len(self._batch)

    def has_room_for(self, num_sequences: int) -> bool:
        """Whether this many more sequences may wait."""
        return self.num_waiting + num_sequences <= self._limits.max_waiting

    def expected_tokens(self, sequence: Sequence) -> int:
        """How many tokens a sequence is expected to come to, prompt included."""
        return self._admission.expected_tokens(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others of its class."""
        assert self._kv_cache.can_ever_fit(sequence.max_tokens), f"{sequence.spec} never fits"
        sequence.order = self._num_orders
        self._num_orders += 1
        self._living[sequence.spec] = sequence
        self._queue_of(sequence).add(sequence)

    def remove(self, sequence: Sequence, end: SequenceEnd) -> None:
        """Forget a living sequence, waiting or running; nobody holds its blocks on return."""
        del self._living[sequence.spec]
        if sequence in self._running:
            self._leave(sequence, is_trusted=end is not SequenceEnd.ERROR)
            self._predictor.observe(
                sequence.prefix.cache_scope,
                sequence.num_output_tokens,
                is_complete=end is SequenceEnd.STOP,
            )
        else:
            self._queue_of(sequence).remove(sequence)
        if sequence.num_preemptions:
            self._kv_cache.give_up(sequence.prefix)

    def schedule(self) -> SchedulerOutput:
        """Let sequences join that fit, then spend one step's time on those who run."""
        self._num_steps += 1
        self._claims.begin_step()
        self._admit()
        running = self._running
        is_wanting = running.is_used & (running.num_scheduled < running.max_tokens - 1)
        owed = running.num_known - running.num_scheduled
        decodes = np.flatnonzero(is_wanting & (owed == 1))
        prefills = np.flatnonzero(is_wanting & (owed > 1))
        self._plan = self._controller.plan(self._demand(decodes, prefills))
        decodes = self._shed(decodes)
        chunks = self._chunks(prefills)
        decodes, chunks = self._secure(decodes, chunks)
        return self._output(decodes, chunks)

    def update(
        self,
        work: SchedulerOutput,
        token_ids: NDArray[np.int64],
        errors: Mapping[int, str],
        now: float,
        logprobs: StepLogprobs | None = None,
    ) -> list[SequenceUpdate]:
        """Record a computed step: one token per sampled row, or why a row failed.

        Rows of sequences that have ended since are counted and otherwise ignored; those of
        sequences that lost their place since keep their token.
        """
        running = self._running
        is_current = running.epoch[work.slots] == work.epochs
        is_computed = is_current.copy()
        if errors:
            is_computed[list(errors)] = False
        self._record_kv(work, is_computed)
        is_told = is_computed & work.is_sampled
        slots = work.slots[is_told]
        running.num_told[slots] += 1
        running.last_token[slots] = token_ids[is_told]
        self._note_start(work.slots[is_current], now)
        # A token of a sequence that has left its slot is told to whoever it is now.
        is_plain = is_told & (running.num_told[work.slots] < running.max_tokens[work.slots])
        if logprobs is not None:
            is_plain[[*logprobs.sampled, *logprobs.prompt]] = False
        updates: list[SequenceUpdate] = []
        living = map(self._living.get, work.specs)
        rows = zip(living, token_ids.tolist(), is_plain.tolist(), strict=True)
        for row, (sequence, token_id, is_plain_row) in enumerate(rows):
            if sequence is None:
                self.num_late_rows += 1
            elif is_plain_row and token_id not in sequence.stop_ids:
                # Hundreds of rows in a step go this way: one more token, and nothing else.
                sequence.token_ids.append(token_id)
                spec, cached = sequence.spec, sequence.num_cached_tokens
                at = sequence.scheduled_at
                said = (spec.request_id, spec.choice, (token_id,), None, cached, at, "", None, None)
                updates.append(_new_tuple(SequenceUpdate, said))
            else:
                is_sampled = bool(work.is_sampled[row])
                if (row in errors or is_sampled) and not is_current[row]:
                    sequence.is_pending = False
                if sequence.scheduled_at is None:
                    sequence.scheduled_at = now
                outcome = _Outcome(token_id if is_sampled else None, errors.get(row))
                if logprobs is not None:
                    scores = logprobs.prompt.get(row, ())
                    scores = sequence.take_scores(int(work.starts[row]), scores)
                    outcome = outcome._replace(logprob=logprobs.sampled.get(row), scores=scores)
                updates += self._told(sequence, outcome)
        return updates

    def _note_start(self, slots: Slots, now: float) -> None:
        running = self._running
        for slot in slots[~running.is_started[slots]].tolist():
            running.is_started[slot] = True
            sequence = running.sequence(slot)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now

    def _told(self, sequence: Sequence, outcome: "_Outcome") -> list[SequenceUpdate]:
        """Give a sequence what a row found out for it, and end it if there is no more to come."""
        if outcome.error is not None:
            self.remove(sequence, SequenceEnd.ERROR)
            return [sequence.ended(SequenceEnd.ERROR, outcome.error)]
        if outcome.token_id is None and not outcome.scores:
            return []
        if outcome.token_id is not None:
            sequence.token_ids.append(outcome.token_id)
        end = sequence.end
        if end is not None:
            self.remove(sequence, end)
        return [sequence.told(outcome.token_id, end, outcome.logprob, outcome.scores)]

    def check(self) -> None:
        """Running sequences alone hold blocks, and no sequence is kept twice."""
        self._kv_cache.check()
        self._running.check()
        waiting = [*self._interactive, *self._batch]
        assert len(waiting) == len(set(waiting))
        assert not any(sequence in self._running for sequence in waiting)
        assert len(waiting) + len(self._running) == len(self._living)
        for queue in (self._interactive, self._batch):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders), "a queue is out of order"

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self._interactive if sequence.is_interactive else self._batch

    # Joining and leaving

    def _admit(self) -> None:
        # Strictly in order: a smaller one behind the head could overtake it for ever.
        running = self._running
        if self._admission.is_short:
            self._admission.note_projection(self._growth())
        while (sequence := self._interactive.head) is not None:
            num_interactive = int(running.is_interactive[running.is_used].sum())
            if sequence.is_pending or num_interactive >= self._plan.max_interactive:
                return
            if not self._may_join(sequence) and not self._make_way_for(sequence):
                return
            self._join(sequence)
        while (sequence := self._batch.head) is not None:
            if sequence.is_pending or not (self._plan.may_admit_batch or not self.num_running):
                return
            if not self._may_join(sequence):
                return
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)
        self._running.join(sequence, self._admission.open(sequence))

    def _growth(self) -> Growth:
        running = self._running
        slots = np.flatnonzero(running.is_used)
        return running.growth(slots, self._kv_cache.num_shared_blocks)

    def _may_join(self, sequence: Sequence) -> bool:
        return self._running.num_free > 0 and self._admission.may_join(sequence, self._growth())

    def _make_way_for(self, sequence: Sequence) -> bool:
        """Stop batch-class sequences for an interactive one, if that is enough to let it join."""
        running = self._running
        is_victim = running.is_used & ~running.is_interactive & ~running.is_guaranteed
        victims = np.flatnonzero(is_victim)
        if not len(victims):
            return False
        others = np.flatnonzero(running.is_used & ~is_victim)
        held = [block for slot in others.tolist() for block in running.table(slot).blocks]
        growth = running.growth(others, num_shared=len(held) - len(set(held)))
        if not self._admission.may_join(sequence, growth):
            return False
        for slot in victims[np.argsort(-running.rank[victims])].tolist():
            self._preempt(slot)
            if self._may_join(sequence):
                return True
        return False

    def _leave(
        self, sequence: Sequence, *, is_preempted: bool = False, is_trusted: bool = True
    ) -> None:
        slot = self._running.slot_of(sequence)
        num_computed = int(self._running.num_computed[slot])
        table = self._running.leave(slot)
        self._kv_cache.close(table, num_computed, is_preempted=is_preempted, is_trusted=is_trusted)

    def _preempt(self, slot: int) -> None:
        sequence = self._running.sequence(slot)
        assert not must_be_guaranteed(sequence), "a guaranteed sequence loses its place"
        running = self._running
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

    # Dividing the step

    def _demand(self, decodes: Slots, prefills: Slots) -> StepDemand:
        running = self._running
        is_interactive = running.is_interactive[decodes]
        context = running.num_scheduled[decodes]
        owed = running.num_due[prefills] - running.num_scheduled[prefills]
        is_short = (owed <= self._limits.chunk_size) & running.is_interactive[prefills]
        first = prefills[np.argmin(running.rank[prefills])] if len(prefills) else None
        return StepDemand(
            interactive_decodes=int(is_interactive.sum()),
            interactive_context=float(context[is_interactive].sum()),
            batch_decodes=len(decodes) - int(is_interactive.sum()),
            batch_context=float(context[~is_interactive].sum()),
            prefill_tokens=int(owed.sum()),
            prefill_context=0.0 if first is None else float(running.num_scheduled[first]),
            max_prefill_tokens=self._limits.max_num_batched_tokens - len(decodes),
            short_prefill_tokens=int(owed[is_short].sum()),
        )

    def _shed(self, decodes: Slots) -> Slots:
        """Leave out the batch-class decodes that the plan has no time for, in rotation."""
        running = self._running
        batch = decodes[~running.is_interactive[decodes]]
        if len(batch) > self._plan.batch_decodes:
            longest_unserved = np.argsort(running.last_served[batch], kind="stable")
            batch = batch[longest_unserved[: self._plan.batch_decodes]]
            decodes = np.concatenate((decodes[running.is_interactive[decodes]], batch))
        running.last_served[decodes] = self._num_steps
        return decodes

    def _chunks(self, prefills: Slots) -> dict[int, int]:
        """Tokens by slot, for prompts that need not wait for a block that somebody computes."""
        running, chunk_size = self._running, self._limits.chunk_size
        budget = self._plan.prefill_tokens
        owed = running.num_due[prefills] - running.num_scheduled[prefills]
        is_batch = ~running.is_interactive[prefills]
        order = service_order(owed, running.rank[prefills], is_batch, chunk_size, budget)
        chunks: dict[int, int] = {}
        num_looks = 0
        for index, most in order:
            if budget <= 0 or num_looks > MAX_LOOKS:
                break
            slot = int(prefills[index])
            granted = chunks.get(slot, 0)
            more = self._ready_tokens(slot, min(most, granted + budget)) - granted
            if more > 0:
                chunks[slot] = granted + more
                budget -= more
            else:
                num_looks += 1
        return chunks

    def _ready_tokens(self, slot: int, most: int) -> int:
        """How many tokens of a prompt can be computed now, at most `most`.

        None while another sequence is computing the same: then those need not be computed,
        unless their logprobs are wanted.
        """
        running = self._running
        start = int(running.num_scheduled[slot])
        is_scoring = running.sequence(slot).is_scoring
        if start == running.num_computed[slot] and not is_scoring:
            num_attached = self._kv_cache.attach_prefix(running.table(slot), start)
            if num_attached != start:
                self._note_attached(slot, start, num_attached)
                start = num_attached
        count = min(most, int(running.num_due[slot]) - start)
        is_claimed = self._claims.try_claim(running.sequence(slot), start, count)
        return count if is_claimed or is_scoring else 0

    def _note_attached(self, slot: int, start: int, end: int) -> None:
        running = self._running
        running.num_scheduled[slot] = running.num_computed[slot] = end
        running.see_blocks(slot)
        sequence = running.sequence(slot)
        if sequence.num_preemptions == 0 or sequence.scheduled_at is None:
            hit = max(0, min(end, sequence.spec.num_prompt_tokens) - start)
            sequence.num_cached_tokens += hit
            self.num_cached_tokens += hit

    # Blocks

    def _secure(self, decodes: Slots, chunks: dict[int, int]) -> tuple[Slots, dict[int, int]]:
        """Find blocks for the step, the most important first; returns who has got them.

        Whoever is stopped to make room ranks behind all that have been secured before.
        """
        running = self._running
        due = decodes[running.num_scheduled[decodes] >= running.capacity[decodes]].tolist()
        wanted = dict.fromkeys(due, 1) | chunks
        order = sorted(
            wanted, key=lambda slot: (not running.is_guaranteed[slot], running.rank[slot])
        )
        epochs = running.epoch.copy()
        granted = dict(chunks)
        stalled = set()
        for slot in order:
            if running.epoch[slot] != epochs[slot]:
                continue
            start = int(running.num_scheduled[slot])
            end = self._grow(slot, start + wanted[slot])
            if slot in chunks:
                granted[slot] = end - start
            elif end == start:
                stalled.add(slot)
        is_stopped = running.epoch != epochs
        decodes = decodes[~is_stopped[decodes]]
        if stalled:
            decodes = decodes[[slot not in stalled for slot in decodes.tolist()]]
        granted = {slot: count for slot, count in granted.items() if count and not is_stopped[slot]}
        return decodes, granted

    def _grow(self, slot: int, end: int) -> int:
        """Find blocks for the sequence's tokens up to `end`; returns how far they reach."""
        running, kv_cache = self._running, self._kv_cache
        table = running.table(slot)
        if end <= running.capacity[slot]:
            return end
        if kv_cache.blocks_for(end) > table.num_projected_blocks:
            self._admission.project_again(running.sequence(slot), table)
        while not kv_cache.try_grow(table, end):
            victim = self._victim_for(slot)
            if victim is None:
                break
            self._admission.note_preemption()
            self._preempt(victim)
        running.see_blocks(slot)
        return min(end, int(running.capacity[slot]))

    def _victim_for(self, slot: int) -> int | None:
        """Who ranks last, if that is behind the sequence that needs room."""
        running = self._running
        candidates = np.flatnonzero(running.is_used & ~running.is_guaranteed)
        if not running.is_guaranteed[slot]:
            candidates = candidates[running.rank[candidates] > running.rank[slot]]
        if not len(candidates):
            return None
        return int(candidates[np.argmax(running.rank[candidates])])

    # Values in and out

    def _output(self, decodes: Slots, chunks: dict[int, int]) -> SchedulerOutput:
        running = self._running
        slots = np.concatenate((decodes, np.array(list(chunks), np.int64)))
        starts = running.num_scheduled[slots]
        counts = np.ones(len(slots), np.int64)
        counts[len(decodes) :] = list(chunks.values())
        ends = starts + counts
        is_pending = running.num_known[decodes] > running.num_told[decodes]
        token_ids = [np.where(is_pending, PENDING, running.last_token[decodes])]
        targets = {}
        for row, (slot, count) in enumerate(chunks.items(), start=len(decodes)):
            start = int(running.num_scheduled[slot])
            sequence = running.sequence(slot)
            token_ids.append(np.array(sequence.token_ids[start : start + count], np.int64))
            if sequence.is_scoring:
                targets[row] = np.array(sequence.targets(start, count), np.int64)
        is_sampled = ends == running.num_known[slots]
        histories = self._histories(slots, is_sampled)
        running.num_scheduled[slots] = ends
        running.num_known[slots[is_sampled]] += 1
        width = self._kv_cache.blocks_for(int(ends.max())) if len(slots) else 0
        return SchedulerOutput(
            moves=self._kv_cache.take_moves(),
            specs=tuple(running.specs[slots].tolist()),
            slots=slots,
            epochs=running.epoch[slots],
            starts=starts,
            counts=counts,
            token_ids=np.concatenate(token_ids),
            block_tables=running.block_tables[slots, :width],
            is_sampled=is_sampled,
            histories=histories,
            targets=targets,
        )

    def _histories(
        self, slots: Slots, is_sampled: NDArray[np.bool_]
    ) -> dict[int, NDArray[np.int64]]:
        """The tokens, by row, of the sequences whose sampling asks for them."""
        running = self._running
        histories = {}
        for row in np.flatnonzero(is_sampled & running.needs_history[slots]).tolist():
            slot = int(slots[row])
            history = running.sequence(slot).history
            assert history is not None, "a sequence has no history though its sampling needs it"
            is_pending = bool(running.num_known[slot] > running.num_told[slot])
            histories[row] = history.tokens(is_pending=is_pending)
        return histories

    def _record_kv(self, work: SchedulerOutput, is_computed: NDArray[np.bool_]) -> None:
        """Note what has KV now, and let blocks be shared that have become full."""
        running, size = self._running, self._kv_cache.block_size
        ends = work.ends
        running.num_computed[work.slots[is_computed]] = ends[is_computed]
        is_full = ends // size != work.starts // size
        is_prompt = ends == running.num_prompt_tokens[work.slots]
        for row in np.flatnonzero(is_computed & (is_full | is_prompt)).tolist():
            table = running.table(int(work.slots[row]))
            self._kv_cache.record(table, int(ends[row]), offers_tail=bool(is_prompt[row]))
            if table.num_seen < len(table.blocks):
                running.see_blocks(int(work.slots[row]))
