"""How many prefill tokens a step has beside readers, given the seconds that are left for them.

As a rule as many as fit, and what is no whole token is carried over. Where even the readers'
decodes alone fill the target, two things differ: a chunk that would be mostly overhead comes
rarely and large instead of always and small, and now and then a step goes without one, to see
what the decodes alone take. Short prompts may stretch a step, a few times in a row.
"""

from math import inf, sqrt
from typing import NamedTuple

from engine.scheduling.step_seconds import chunk_overhead_seconds
from engine.scheduling.step_time_model import Prices

# The chunk keeps this part of the slack, when it needs it, against batch decodes.
PREFILL_FLOOR = 0.25
# A chunk that costs more than this part of its share before its first token is not worth a step.
WORTHWHILE = 0.5
# Such a chunk comes once in so many steps: too rarely to be among the slowest five in a hundred.
RARELY = 24
# Steps that short prompts may stretch one after the other, before that is as rare.
MOST_EXCEPTIONS = 16.0
# After so many steps with a chunk one goes without, where nothing else tells what decodes take.
LOOK_EVERY = 8


class PrefillRoom(NamedTuple):
    """What a step leaves for prefill.

    Of the `owed` tokens that may be computed at all, `short` are owed by prompts that one chunk
    completes; the first of them reads `context` tokens of KV. A chunk may take `share_s`
    seconds, for once `long_s`, and of those `extra_s` go to what the readers' decodes take more
    in a step with a chunk. `is_hopeless` says that the pace is set by the decodes alone, not by
    the target. `prices` are those of steps with a chunk.
    """

    owed: int
    short: int
    context: float
    share_s: float
    long_s: float
    extra_s: float
    is_hopeless: bool
    prices: Prices

    def tokens_within(self, seconds: float) -> float:
        """How many tokens take so long: the positive root of a quadratic, or inf if all is free.

        Where the overhead leaves next to nothing, the floor again: a chunk must be worth its step.
        """
        prices = self.prices
        left_s = max(seconds - self.overhead_s, PREFILL_FLOOR * seconds)
        per_token = prices.token + prices.context + prices.pair * self.context
        divisor = per_token + sqrt(per_token * per_token + 2 * prices.pair * left_s)
        return 2 * left_s / divisor if divisor > 0.0 else inf

    @property
    def overhead_s(self) -> float:
        """What a chunk costs before its first token."""
        return self.extra_s + chunk_overhead_seconds(self.context, self.prices)


class PrefillShare:
    """Remembers what the last steps had, so that shares are fair over many of them.

    Each step has at least `least_tokens` (a part of one) while any are owed, carried over until
    they make a whole token.
    """

    def __init__(self, least_tokens: float) -> None:
        self._least_tokens = least_tokens
        self._carry = 0.0
        self._num_chunk_steps = 0
        self._num_without_chunk = 0
        self._exceptions = MOST_EXCEPTIONS

    def take(self, room: PrefillRoom) -> int:
        """The prefill tokens of the next step; call it once per step with readers."""
        fitting = room.tokens_within(room.long_s)
        if room.is_hopeless and room.overhead_s > WORTHWHILE * room.share_s:
            tokens = self._rare_chunk(room.owed, fitting)
        else:
            tokens = self._unless_due_a_look(self._what_fits(room), room.is_hopeless)
        short = int(min(room.short, room.owed, fitting))
        return max(tokens, self._if_it_is_the_exception(short, tokens))

    def _what_fits(self, room: PrefillRoom) -> int:
        if room.owed == 0:
            self._carry = 0.0
            return 0
        fitting = min(room.tokens_within(room.share_s), room.owed)
        exact = self._carry + max(fitting, self._least_tokens)
        tokens = min(int(exact), room.owed)
        self._carry = min(exact - tokens, 1.0)
        return tokens

    def _unless_due_a_look(self, tokens: int, is_hopeless: bool) -> int:
        """Where the pace is set by what the decodes alone take, see now and then what that is."""
        self._num_chunk_steps = self._num_chunk_steps + 1 if tokens and is_hopeless else 0
        if self._num_chunk_steps < LOOK_EVERY:
            return tokens
        self._num_chunk_steps = 0
        return 0

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
