"""Divides a step among those who run: which decodes, and how much of which prompt.

The inter-token controller says how much the step may compute; here it is given to sequences.
"""

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduling.chunks import service_order
from engine.scheduling.inter_token_controller import StepDemand
from engine.scheduling.prefix_claims import PrefixClaims
from engine.scheduling.roster import Roster
from engine.scheduling.scheduler_limits import SchedulerLimits

Slots = NDArray[np.int64]

# Prompts looked at in a step beyond those that it has tokens for: they wait for others' blocks.
MAX_LOOKS = 64


class StepDivision:
    """Hands out a step's decodes and prefill tokens."""

    def __init__(self, roster: Roster, kv_cache: KVCacheManager, limits: SchedulerLimits) -> None:
        self._roster = roster
        self._running = roster.running
        self._kv_cache = kv_cache
        self._limits = limits
        self._claims = PrefixClaims(kv_cache.block_size)
        self._num_steps = 0

    def begin_step(self) -> None:
        """Another step is to be divided."""
        self._num_steps += 1
        self._claims.begin_step()

    def demand(self, decodes: Slots, prefills: Slots) -> StepDemand:
        """What could be computed in this step, for the controller."""
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

    def shed(self, decodes: Slots, batch_decodes: int) -> Slots:
        """Leave out all but so many batch-class decodes, in rotation."""
        running = self._running
        batch = decodes[~running.is_interactive[decodes]]
        if len(batch) > batch_decodes:
            longest_unserved = np.argsort(running.last_served[batch], kind="stable")
            batch = batch[longest_unserved[:batch_decodes]]
            decodes = np.concatenate((decodes[running.is_interactive[decodes]], batch))
        running.last_served[decodes] = self._num_steps
        return decodes

    def chunks(self, prefills: Slots, budget: int) -> dict[int, int]:
        """Tokens by slot, for prompts that need not wait for a block that somebody computes."""
        running, chunk_size = self._running, self._limits.chunk_size
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
                self._roster.note_attached(slot, start, num_attached)
                start = num_attached
        count = min(most, int(running.num_due[slot]) - start)
        is_claimed = self._claims.try_claim(running.sequence(slot), start, count)
        return count if is_claimed or is_scoring else 0
