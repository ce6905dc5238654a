"""What one engine step did to one sequence, before text, screening and money."""

from enum import StrEnum
from typing import NamedTuple

from engine.interface.token_logprobs import TokenLogprob


class SequenceEnd(StrEnum):
    """Why the engine stopped computing a sequence."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class SequenceUpdate(NamedTuple):
    """Tokens sampled for one choice in one step, and whether it ended with them.

    `token_ids` excludes resumed tokens and includes a final end-of-sequence token.
    `num_cached_tokens` counts prompt tokens whose KV came from the prefix cache.
    `scheduled_at` is the monotonic second at which the sequence was first computed, None if
    it never was. `message` explains an ERROR end to an operator, never to a caller.
    `logprobs` has one entry per token of `token_ids`, or is None when they were not asked for.
    `prompt_logprobs` goes on where the sequence's last one ended, from the prompt's second
    token; every token is there once, all of them before or with the first output token.
    An end that the engine was asked for or brought about between two steps says how many steps
    it had done by then, and how many KV blocks came free.
    A named tuple, since a step makes hundreds and a frozen dataclass costs four times as much.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None = None
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    message: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    step: int = 0
    blocks_freed: int = 0
