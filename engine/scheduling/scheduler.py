"""Decides what to compute next, and records what came of it.

A sequence has no phase. Some of its tokens have KV and the others are owed; each step pays
part of the debt. Whoever owes a single token is talking and is paid first; what is left of
the step, as the inter-token controller measures it out, goes to prompts in chunks.

Sequences join by projected KV. A projection can be wrong: when blocks run out, those who rank
last lose their place (batch class before interactive, youngest first), at most three times
each, and find their KV again when they return. Nothing here touches a tensor.
"""

from collections.abc import Mapping
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.interface.token_logprobs import StepLogprobs, TokenLogprob
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduling.admission import Predictor
from engine.scheduling.inter_token_controller import InterTokenController, StepPlan
from engine.scheduling.roster import Roster
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.scheduler_output import PENDING, SchedulerOutput
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_division import Slots, StepDivision

# What a named tuple's own constructor ends in, without a call of Python's on the way.
_new_update = partial(tuple.__new__, SequenceUpdate)


class _Outcome(NamedTuple):
    """What one row's computation means for its sequence, when it is not simply one more token."""

    token_id: int | None
    error: str | None
    logprob: TokenLogprob | None = None
    scores: tuple[TokenLogprob, ...] = ()


class Scheduler:
    """Decides steps and records them. `roster` knows who waits and who runs."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: SchedulerLimits,
        predictor: Predictor,
        controller: InterTokenController,
    ) -> None:
        self.roster = Roster(kv_cache, limits, predictor)
        self.num_late_rows = 0
        self._kv_cache = kv_cache
        self._controller = controller
        self._running = self.roster.running
        self._division = StepDivision(self.roster, kv_cache, limits)
        self._plan = StepPlan(0, 0, max_interactive=limits.max_num_seqs, may_admit_batch=True)

    def schedule(self) -> SchedulerOutput:
        """Let sequences join that fit, then spend one step's time on those who run."""
        self._division.begin_step()
        self.roster.admit(self._plan)
        running = self._running
        is_wanting = running.is_used & (running.num_scheduled < running.max_tokens - 1)
        owed = running.num_known - running.num_scheduled
        decodes = np.flatnonzero(is_wanting & (owed == 1))
        prefills = np.flatnonzero(is_wanting & (owed > 1))
        self._plan = self._controller.plan(self._division.demand(decodes, prefills))
        decodes = self._division.shed(decodes, self._plan.batch_decodes)
        chunks = self._division.chunks(prefills, self._plan.prefill_tokens)
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
        running.tell(work.slots[is_told], token_ids[is_told])
        self._note_start(work.slots[is_current], now)
        # Hundreds of rows in a step get one more token, and nothing else is to be done.
        is_plain = is_told & (running.num_told[work.slots] < running.max_tokens[work.slots])
        is_plain &= ~(running.needs_history[work.slots] | running.may_stop(token_ids))
        if logprobs is not None:
            is_plain[[*logprobs.sampled, *logprobs.prompt]] = False
        updates = self._plainly_told(work.slots[is_plain], token_ids[is_plain])
        for row in np.flatnonzero(~is_plain).tolist():
            sequence = self.roster.find(work.specs[row])
            if sequence is None:
                self.num_late_rows += 1
                continue
            if is_current[row]:
                running.catch_up(int(work.slots[row]))
            elif sequence.scheduled_at is None:
                sequence.scheduled_at = now
            outcome = _Outcome(
                token_id=int(token_ids[row]) if work.is_sampled[row] else None,
                error=errors.get(row),
            )
            if logprobs is not None:
                scores = logprobs.prompt.get(row, ())
                scores = sequence.take_scores(int(work.starts[row]), scores)
                outcome = outcome._replace(logprob=logprobs.sampled.get(row), scores=scores)
            updates += self._told(sequence, outcome, is_running=bool(is_current[row]))
        return updates

    def _plainly_told(self, slots: Slots, token_ids: NDArray[np.int64]) -> list[SequenceUpdate]:
        """One token each, without a call of Python's for each."""
        running = self._running
        columns = zip(
            running.request_ids[slots].tolist(),
            running.choices[slots].tolist(),
            zip(token_ids.tolist(), strict=True),
            repeat(None),
            running.num_cached_tokens[slots].tolist(),
            running.scheduled_at[slots].tolist(),
            repeat(""),
            repeat(None),
            repeat(None),
            strict=False,
        )
        return list(map(_new_update, columns))

    def _note_start(self, slots: Slots, now: float) -> None:
        running = self._running
        for slot in slots[np.isnan(running.scheduled_at[slots])].tolist():
            sequence = running.sequence(slot)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
            running.scheduled_at[slot] = sequence.scheduled_at

    def _told(
        self, sequence: Sequence, outcome: "_Outcome", *, is_running: bool
    ) -> list[SequenceUpdate]:
        """Give a sequence what a row found out for it, and end it if there is no more to come.

        One that still runs has its token; one that lost its place since gets it here.
        """
        if not is_running and (outcome.token_id is not None or outcome.error is not None):
            sequence.is_pending = False
        if outcome.error is not None:
            self.roster.remove(sequence, SequenceEnd.ERROR)
            return [sequence.ended(SequenceEnd.ERROR, outcome.error)]
        if outcome.token_id is None and not outcome.scores:
            return []
        if outcome.token_id is not None and not is_running:
            sequence.token_ids.append(outcome.token_id)
        end = sequence.end
        if end is not None:
            self.roster.remove(sequence, end)
        return [sequence.told(outcome.token_id, end, outcome.logprob, outcome.scores)]

    def check(self) -> None:
        """Running sequences alone hold blocks, and the books agree; see the parts."""
        self._kv_cache.check()
        self.roster.check()

    # Blocks

    def _secure(self, decodes: Slots, chunks: dict[int, int]) -> tuple[Slots, dict[int, int]]:
        """Find blocks for the step; returns who has got them."""
        running, kv_cache = self._running, self._kv_cache
        due = decodes[running.num_scheduled[decodes] >= running.capacity[decodes]]
        num_missing = len(due) + sum(
            kv_cache.blocks_for(int(running.num_scheduled[slot]) + count)
            - len(running.table(slot).blocks)
            for slot, count in chunks.items()
        )
        if num_missing > kv_cache.num_free_blocks:
            return self._secure_in_order(decodes, due.tolist(), chunks)
        # As a rule there is room for all, and nobody's rank matters.
        places = running.capacity[due] // kv_cache.block_size
        outgrows = places >= running.num_projected_blocks[due]
        as_expected = due[~outgrows]
        tables = list(map(running.table, as_expected.tolist()))
        running.see_block_each(as_expected, kv_cache.grow_each(tables))
        for slot in due[outgrows].tolist():
            self._grow(slot, int(running.num_scheduled[slot]) + 1)
        for slot, count in chunks.items():
            self._grow(slot, int(running.num_scheduled[slot]) + count)
        return decodes, chunks

    def _secure_in_order(
        self, decodes: Slots, due: list[int], chunks: dict[int, int]
    ) -> tuple[Slots, dict[int, int]]:
        """Find blocks for the most important first, where they will not do for all.

        Whoever is stopped to make room ranks behind all that have been secured before.
        """
        running = self._running
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
            running.catch_up(slot)
            self.roster.admission.project_again(running.sequence(slot), table)
        while not kv_cache.try_grow(table, end):
            victim = self.roster.victim_for(slot)
            if victim is None:
                break
            self.roster.admission.note_shortage()
            self.roster.preempt(victim)
        running.see_blocks(slot)
        return min(end, int(running.capacity[slot]))

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
        rows = np.flatnonzero(is_computed & (is_full | is_prompt))
        slots = work.slots[rows].tolist()
        running.catch_up(*slots)
        news = zip(slots, ends[rows].tolist(), is_prompt[rows].tolist(), strict=True)
        for slot, end, offers_tail in news:
            table = running.table(slot)
            self._kv_cache.record(table, end, offers_tail=offers_tail)
            if table.num_seen < len(table.blocks):
                running.see_blocks(slot)
