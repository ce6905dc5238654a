"""How likely the model held a token to be, and what it held to be likelier.

A logprob is the natural logarithm of the model's own probability: the softmax of its scores as
they came, before bias, penalties, temperature, filters and masks. So it says the same of a
token however it was chosen. (vLLM calls this `raw_logprobs`, its default.)
"""

from collections.abc import Mapping
from typing import NamedTuple

# Stands for everything less likely, also for the impossible: JSON has no infinity.
LEAST_LOGPROB = -9999.0
MAX_LOGPROBS = 20


class TokenLogprob(NamedTuple):
    """One token's logprob, and the likeliest tokens in its place, the likeliest first.

    The lists are as long as was asked for; the token itself may or may not be among them.
    Equally likely tokens stand in the order of their ids. All numbers are finite.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepLogprobs(NamedTuple):
    """What one step found out, by row: of the token it sampled, and of prompt tokens.

    `prompt[r]` begins with the token that follows the row's first one.
    """

    sampled: Mapping[int, TokenLogprob]
    prompt: Mapping[int, tuple[TokenLogprob, ...]]
