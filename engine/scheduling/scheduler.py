"""Decides what to compute next, and records what came of it.

A sequence has no phase. Some of its tokens have KV and the others are owed; each step pays
part of the debt. Whoever owes a single token is talking and is paid first; what is left of
the step, as the inter-token controller measures it out, goes to prompts in chunks.

Sequences join by projected KV. A projection can be wrong: when blocks run out, those who rank
last lose their place (batch class before interactive, youngest first), at most three times
each, and find their KV again when they return. Nothing here touches a tensor.
"""

from collections.abc import Mapping
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
_new_tuple = tuple.__new__


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
        slots = work.slots[is_told]
        running.num_told[slots] += 1
        running.last_token[slots] = token_ids[is_told]
        self._note_start(work.slots[is_current], now)
        # A token of a sequence that has left its slot is told to whoever it is now.
        is_plain = is_told & (running.num_told[work.slots] < running.max_tokens[work.slots])
        if logprobs is not None:
            is_plain[[*logprobs.sampled, *logprobs.prompt]] = False
        updates: list[SequenceUpdate] = []
        living = map(self.roster.find, work.specs)
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
            self.roster.remove(sequence, SequenceEnd.ERROR)
            return [sequence.ended(SequenceEnd.ERROR, outcome.error)]
        if outcome.token_id is None and not outcome.scores:
            return []
        if outcome.token_id is not None:
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
        for row in np.flatnonzero(is_computed & (is_full | is_prompt)).tolist():
            table = running.table(int(work.slots[row]))
            self._kv_cache.record(table, int(ends[row]), offers_tail=bool(is_prompt[row]))
            if table.num_seen < len(table.blocks):
                running.see_blocks(int(work.slots[row]))
