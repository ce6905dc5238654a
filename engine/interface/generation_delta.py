"""What came out: the unit of the log, the feed and the ledger."""

from dataclasses import dataclass
from enum import StrEnum

from engine.interface.token_logprobs import TokenLogprob


class FinishReason(StrEnum):
    """Why a choice ended normally; the words are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: each prompt counted once, outputs of all choices together.

    `cached_tokens` says how many of `prompt_tokens` came from the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """Some more of one choice.

    `serial` counts the request's deltas from 0: a reader that sees another number than it
    expects has missed one, or has seen it before. `offset` is how many output tokens of the
    request, over all choices, were delivered before this delta.
    `text` may be empty while `token_ids` is not: a partial character, or the possible beginning
    of a stop string, is held back. A choice's last delta has its `finish_reason`. The request's
    last delta, and it alone, has `usage`; when the request did not finish normally `error`
    holds the code ("cancelled", "replica_lost", ...), and unfinished choices have no reason.
    `is_settled` is False for an ending that the ledger will only learn of later.
    `logprobs` has one entry per token of `token_ids`, or is None when they were not asked for.
    `prompt_logprobs` has one per prompt token but the first, and is in a choice's first delta.
    """

    request_id: str
    choice: int
    serial: int
    offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    is_settled: bool = True

    @property
    def is_last(self) -> bool:
        """True for the one delta that ends the request."""
        return self.usage is not None
