"""What one engine step did to one sequence, before text, screening and money."""

from enum import StrEnum
from typing import NamedTuple


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
    A named tuple, since a step makes hundreds and a frozen dataclass costs four times as much.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    end: SequenceEnd | None = None
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    message: str = ""
