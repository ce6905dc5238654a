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
from math import inf, sqrt
from typing import NamedTuple

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
# A chunk that costs more than this part of its share before its first token is not worth a step.
WORTHWHILE = 0.5
# Such a chunk comes once in so many steps: too rarely to be among the slowest five in a hundred.
RARELY = 24
# Steps that short prompts may stretch one after the other, before that is as rare.
MOST_EXCEPTIONS = 16.0
# The chunk keeps this part of the slack, when it needs it, against batch decodes.
PREFILL_FLOOR = 0.25
# At worst, one batch decode and one prefill token are computed in this many steps.
MAX_STEPS_WITHOUT = 32
# Nobody joins while the readers' decodes alone take more than this many times the target ...
CROWDED = 1.5
# ... and this many times the shortest such step: turning sequences away cannot make a step
# shorter than that, and up to here more of it is spent on rows than on overhead.
LONE_READERS = 4.0
# With so few readers a step is as short as the machine makes it at present.
FEW_READERS = 2
# After so many steps with a chunk one goes without, where nothing else tells what decodes take.
LOOK_EVERY = 8
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
        # What is left of a token and of a decode when the share of a step is no whole number.
        self._prefill_carry = 0.0
        self._batch_carry = 0.0
        self._num_chunk_steps = 0
        self._num_without_chunk = 0
        self._exceptions = MOST_EXCEPTIONS
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
        alone_s = prices.base + _decodes_seconds(readers, demand.interactive_context, prices)
        self._effective_target_s = max(self._target_s, STRETCH * alone_s)
        slack_s = max(AIM * self._target_s, STRETCH * alone_s) - alone_s

        beside = self._model.prices(has_chunk=True)
        # What a chunk step of these readers takes more than another, before any chunk.
        extra_s = beside.base + _decodes_seconds(readers, demand.interactive_context, beside)
        extra_s -= alone_s
        chunk_s = extra_s + _chunk_seconds(owed, demand.prefill_context, beside)
        floor_s = max(0.0, min(PREFILL_FLOOR * slack_s, chunk_s))
        batch_decodes, batch_s = self._share_of_batch(demand, slack_s - floor_s, prices)
        share_s = max(floor_s, slack_s - batch_s)
        context = demand.prefill_context
        long_s = (self._long_stretch(alone_s) - 1.0) * alone_s
        fitting = _tokens_within(long_s, extra_s, context, beside)
        overhead_s = extra_s + _chunk_overhead_seconds(context, beside)
        if self._is_hopeless(alone_s) and overhead_s > WORTHWHILE * share_s:
            prefill_tokens = self._rare_chunk(owed, fitting)
        else:
            prefill_tokens = self._share_of_prefill(demand, owed, share_s, extra_s)
            prefill_tokens = self._unless_due_a_look(prefill_tokens, alone_s)
        short = int(min(demand.short_prefill_tokens, owed, fitting))
        prefill_tokens = max(prefill_tokens, self._if_it_is_the_exception(short, prefill_tokens))

        max_interactive = self._max_interactive(readers, alone_s)
        return StepPlan(
            prefill_tokens=prefill_tokens,
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
        all_s = _decodes_seconds(demand.batch_decodes, demand.batch_context, prices)
        if all_s <= share_s:
            self._batch_carry = 0.0
            return demand.batch_decodes, all_s
        one_s = all_s / demand.batch_decodes
        exact = self._batch_carry + max(share_s / one_s, 1.0 / MAX_STEPS_WITHOUT)
        decodes = min(int(exact), demand.batch_decodes)
        self._batch_carry = min(exact - decodes, 1.0)
        return decodes, max(share_s, decodes * one_s)

    def _unless_due_a_look(self, prefill_tokens: int, alone_s: float) -> int:
        """Where the pace is set by what the decodes alone take, see now and then what that is."""
        is_hopeless = self._is_hopeless(alone_s)
        self._num_chunk_steps = self._num_chunk_steps + 1 if prefill_tokens and is_hopeless else 0
        if self._num_chunk_steps < LOOK_EVERY:
            return prefill_tokens
        self._num_chunk_steps = 0
        return 0

    def _share_of_prefill(
        self, demand: StepDemand, owed: int, share_s: float, extra_s: float
    ) -> int:
        """How many prefill tokens fit."""
        if owed == 0:
            self._prefill_carry = 0.0
            return 0
        prices = self._model.prices(has_chunk=True)
        fitting = _tokens_within(share_s, extra_s, demand.prefill_context, prices)
        exact = self._prefill_carry + max(min(fitting, owed), 1.0 / MAX_STEPS_WITHOUT)
        tokens = min(int(exact), owed)
        self._prefill_carry = min(exact - tokens, 1.0)
        return tokens

    def _is_hopeless(self, alone_s: float) -> bool:
        """Whether the pace is set by the decodes alone, not by the target."""
        return STRETCH * alone_s > AIM * self._target_s

    def _rare_chunk(self, owed: int, fitting: float) -> int:
        """Where a chunk costs more than the share of a step before its first token.

        Many small ones would slow every step for nothing, so there are few large ones.
        """
        if owed == 0:
            return 0
        self._num_without_chunk += 1
        if self._num_without_chunk < RARELY:
            return 0
        self._num_without_chunk = 0
        return min(owed, max(1, int(fitting)))

    def _if_it_is_the_exception(self, short: int, share: int) -> int:
        """Long steps for short prompts come a few at a time, and then rarely."""
        self._exceptions = min(self._exceptions + 1.0 / RARELY, MOST_EXCEPTIONS)
        if short <= share or self._exceptions < 1.0:
            return share
        self._exceptions -= 1.0
        return short

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


def _decodes_seconds(decodes: int, context: float, prices: Prices) -> float:
    """What decodes that read so much context together add to a step."""
    return decodes * (prices.row + prices.token) + context * prices.context


def _chunk_seconds(tokens: int, context: float, prices: Prices) -> float:
    """What a chunk behind so much context adds to a step of decodes; 0 if it has no tokens."""
    if tokens == 0:
        return 0.0
    per_token = prices.token + prices.context + prices.pair * (context + tokens / 2)
    return _chunk_overhead_seconds(context, prices) + tokens * per_token


def _chunk_overhead_seconds(context: float, prices: Prices) -> float:
    """What a chunk adds before its first token: less than nothing where decodes hide behind it."""
    return prices.chunk_base - prices.base + prices.row + prices.context * context


def _tokens_within(seconds: float, extra_s: float, context: float, prices: Prices) -> float:
    """The inverse of `_chunk_seconds`: the positive root of a quadratic, or inf if all is free.

    Where the overhead leaves next to nothing, the floor again: a chunk must be worth its step.
    """
    overhead_s = extra_s + _chunk_overhead_seconds(context, prices)
    left_s = max(seconds - overhead_s, PREFILL_FLOOR * seconds)
    per_token = prices.token + prices.context + prices.pair * context
    divisor = per_token + sqrt(per_token * per_token + 2 * prices.pair * left_s)
    return 2 * left_s / divisor if divisor > 0.0 else inf


def _plan_seconds(demand: StepDemand, plan: StepPlan, prices: Prices) -> float:
    seconds = _decodes_seconds(demand.interactive_decodes, demand.interactive_context, prices)
    if demand.batch_decodes:
        mean_context = demand.batch_context / demand.batch_decodes
        seconds += plan.batch_decodes * _decodes_seconds(1, mean_context, prices)
    return (
        prices.base + seconds + _chunk_seconds(plan.prefill_tokens, demand.prefill_context, prices)
    )
