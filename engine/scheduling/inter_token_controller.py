"""Decides how much a step may compute so that whoever is reading sees words at a steady pace.

Everybody's next token waits for the whole step, so the step is the time between tokens. Each
step the controller asks the fitted model what the readers' decodes alone will take, and
divides what is left of the target:

    |-- interactive decodes --|-- batch decodes --|-- prefill chunk --|  aim
                              |<-------------- slack ---------------->|

Shed order: the prefill chunk gives way first, batch decodes next, interactive decodes never
(leaving one out of a step would double its reader's wait); instead, nobody joins them. Both
that give way keep a floor, so nothing waits for ever. The budget is computed, not groped for:
it is right in the first step after the load changes. No clock, no I/O.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from engine.scheduling.prefill_share import PREFILL_FLOOR, PrefillRoom, PrefillShare
from engine.scheduling.step_seconds import chunk_seconds, decodes_seconds
from engine.scheduling.step_time_model import Prices, StepShape, StepTimeModel

# A step is planned to take this part of the target: steps vary by about five in a hundred, and
# the target is for the slowest of a hundred.
AIM = 0.94
# Where the readers' decodes alone leave less than that, a step takes this much longer than they.
# A smaller share would keep a long prompt waiting for minutes on a slow machine; with it the
# time between tokens, jitter included, stays within 1.3 times what it was before the prompt came.
STRETCH = 1.2
# Where even the decodes alone fill the target, a step may for once be this many times as long:
# for prompts that one chunk completes (somebody waits for a first word, and it is a matter of a
# few steps), and for chunks that would not be worth their cost if they were smaller.
LONG_STRETCH = 2.3
# At worst, one batch decode and one prefill token are computed in this many steps.
MAX_STEPS_WITHOUT = 32
# Nobody joins while the readers' decodes alone take more than this many times the target ...
CROWDED = 1.5
# ... and this many times the shortest such step: turning sequences away cannot make a step
# shorter than that, and up to here more of it is spent on rows than on overhead.
LONE_READERS = 4.0
# With so few readers a step is as short as the machine makes it at present.
FEW_READERS = 2
# Stands for no limit, where rows seem to cost nothing.
MANY = 1_000_000
# How much a measured step moves the average that metrics show.
MEASURED_GAIN = 0.1


class StepDemand(NamedTuple):
    """What could be computed now.

    Contexts are KV tokens read: summed over all decodes of a class, and of the prefill that
    comes first. `prefill_tokens` are those owed by all prefills, 0 if there are none, and
    `short_prefill_tokens` those of them owed by interactive prompts that one chunk completes;
    `max_prefill_tokens` is the most that a step may compute.
    """

    interactive_decodes: int
    interactive_context: float
    batch_decodes: int
    batch_context: float
    prefill_tokens: int
    prefill_context: float
    max_prefill_tokens: int
    short_prefill_tokens: int = 0


class StepPlan(NamedTuple):
    """What may be computed in this step, besides every interactive decode.

    A further interactive sequence should join only while fewer than `max_interactive` run
    (decoding or not yet; 1 where the readers crowd the step, so that there is always a way on),
    a further batch one only if `may_admit_batch`: not while batch decodes are being left out.
    """

    prefill_tokens: int
    batch_decodes: int
    max_interactive: int
    may_admit_batch: bool


@dataclass(frozen=True, slots=True)
class ControllerState:
    """For metrics. `measured_s` is a moving average over all steps, 0 before the first."""

    target_s: float
    effective_target_s: float
    measured_s: float
    predicted_s: float
    prefill_tokens: int
    batch_decodes: int
    prices: Prices


class InterTokenController:
    """Plans each step from a model that learns from each step.

    `plan` may run a step or two ahead of `observe`: it never reacts to the effect of its plans,
    only to what is known of the machine.
    """

    def __init__(self, target_s: float, model: StepTimeModel) -> None:
        if not 0.0 < target_s < inf:
            raise ValueError(f"The inter-token target must be positive seconds, not {target_s}.")
        self._target_s = target_s
        self._model = model
        self._effective_target_s = target_s
        self._measured_s = 0.0
        self._predicted_s = 0.0
        self._last_plan = StepPlan(0, 0, 1, True)
        self._prefill_share = PrefillShare(1.0 / MAX_STEPS_WITHOUT)
        # What is left of a decode when the share of a step is no whole number.
        self._batch_carry = 0.0
        self._shortest_s = inf

    def plan(self, demand: StepDemand) -> StepPlan:
        """Say what this step may compute; call it once per step."""
        owed = min(demand.prefill_tokens, demand.max_prefill_tokens)
        prices = self._model.prices()
        if demand.interactive_decodes == 0:
            self._effective_target_s = self._target_s
            plan = StepPlan(owed, demand.batch_decodes, MANY, True)
        else:
            plan = self._plan_beside_readers(demand, owed, prices)
        planned = self._model.prices(has_chunk=plan.prefill_tokens > 0)
        self._predicted_s = _plan_seconds(demand, plan, planned)
        self._last_plan = plan
        return plan

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn how long a step took, whether planned here or not."""
        self._model.observe(shape, seconds)
        if 0.0 < seconds < inf:
            gain = MEASURED_GAIN if self._measured_s else 1.0
            self._measured_s += gain * (seconds - self._measured_s)

    def state(self) -> ControllerState:
        """What metrics show of the last plan and the last steps."""
        return ControllerState(
            target_s=self._target_s,
            effective_target_s=self._effective_target_s,
            measured_s=self._measured_s,
            predicted_s=self._predicted_s,
            prefill_tokens=self._last_plan.prefill_tokens,
            batch_decodes=self._last_plan.batch_decodes,
            prices=self._model.prices(),
        )

    def _plan_beside_readers(self, demand: StepDemand, owed: int, prices: Prices) -> StepPlan:
        readers = demand.interactive_decodes
        alone_s = prices.base + decodes_seconds(readers, demand.interactive_context, prices)
        self._effective_target_s = max(self._target_s, STRETCH * alone_s)
        slack_s = max(AIM * self._target_s, STRETCH * alone_s) - alone_s

        beside = self._model.prices(has_chunk=True)
        # What a chunk step of these readers takes more than another, before any chunk.
        extra_s = beside.base + decodes_seconds(readers, demand.interactive_context, beside)
        extra_s -= alone_s
        chunk_s = extra_s + chunk_seconds(owed, demand.prefill_context, beside)
        floor_s = max(0.0, min(PREFILL_FLOOR * slack_s, chunk_s))
        batch_decodes, batch_s = self._share_of_batch(demand, slack_s - floor_s, prices)
        room = PrefillRoom(
            owed=owed,
            short=demand.short_prefill_tokens,
            context=demand.prefill_context,
            share_s=max(floor_s, slack_s - batch_s),
            long_s=(self._long_stretch(alone_s) - 1.0) * alone_s,
            extra_s=extra_s,
            is_hopeless=STRETCH * alone_s > AIM * self._target_s,
            prices=beside,
        )
        max_interactive = self._max_interactive(readers, alone_s)
        return StepPlan(
            prefill_tokens=self._prefill_share.take(room),
            batch_decodes=batch_decodes,
            max_interactive=max_interactive,
            may_admit_batch=readers < max_interactive and batch_decodes == demand.batch_decodes,
        )

    def _share_of_batch(
        self, demand: StepDemand, share_s: float, prices: Prices
    ) -> tuple[int, float]:
        """How many batch decodes fit, and the seconds to set aside for them."""
        if demand.batch_decodes == 0:
            self._batch_carry = 0.0
            return 0, 0.0
        all_s = decodes_seconds(demand.batch_decodes, demand.batch_context, prices)
        if all_s <= share_s:
            self._batch_carry = 0.0
            return demand.batch_decodes, all_s
        one_s = all_s / demand.batch_decodes
        exact = self._batch_carry + max(share_s / one_s, 1.0 / MAX_STEPS_WITHOUT)
        decodes = min(int(exact), demand.batch_decodes)
        self._batch_carry = min(exact - decodes, 1.0)
        return decodes, max(share_s, decodes * one_s)

    def _long_stretch(self, alone_s: float) -> float:
        """How much longer than the decodes alone a step may take for once.

        STRETCH while the target can be kept, LONG_STRETCH when the decodes alone fill it.
        """
        strain = STRETCH * alone_s / (AIM * self._target_s)
        hopelessness = min(max((strain - 1.0) / (STRETCH - 1.0), 0.0), 1.0)
        return STRETCH + hopelessness * (LONG_STRETCH - STRETCH)

    def _max_interactive(self, readers: int, alone_s: float) -> int:
        """No limit, or none further while the readers that there are crowd the step."""
        if readers <= FEW_READERS or alone_s < self._shortest_s:
            self._shortest_s = alone_s
        is_crowded = alone_s > max(CROWDED * self._target_s, LONE_READERS * self._shortest_s)
        return 1 if is_crowded else MANY


def _plan_seconds(demand: StepDemand, plan: StepPlan, prices: Prices) -> float:
    seconds = decodes_seconds(demand.interactive_decodes, demand.interactive_context, prices)
    if demand.batch_decodes:
        mean_context = demand.batch_context / demand.batch_decodes
        seconds += plan.batch_decodes * decodes_seconds(1, mean_context, prices)
    return (
        prices.base + seconds + chunk_seconds(plan.prefill_tokens, demand.prefill_context, prices)
    )
