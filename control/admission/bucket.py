"""What a tenant may use now: token and request buckets, and places for open requests.

A bucket holds what a minute allows and fills evenly. A reservation takes the prompt and the most
that may be said; what was not said comes back when the request has ended, and all of it when its
lease lapses because whoever held it died. So in any stretch of time a tenant gets no more than a
full bucket and what flows into it, however many gateways it asks at once.

The calls here are values; `control.streams.functions` carries them out, each atomic
(`buckets.lua`). A server that has forgotten the bucket says so, and is told what the ledger knows.
"""

from dataclasses import dataclass
from typing import Any

from control.errors import QuotaExceeded, ReservationTooLarge
from control.streams.functions import FunctionCall

# No slot is lost for longer after any crash; the dispatcher renews the leases of open requests.
LEASE_MS = 15_000
# Nobody knows when one of the open requests will end.
CONCURRENT_WAIT_MS = 1_000


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one tenant may use of one model in a minute, and at once over all; None is no limit.

    `bucket` names whose minute it is: the model's own, or `*` for all that have none.
    """

    bucket: str
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether there is nothing to ask."""
        limits = (self.tokens_per_minute, self.requests_per_minute, self.max_concurrent)
        return all(limit is None for limit in limits)


@dataclass(frozen=True, slots=True)
class Left:
    """What is left after a question. None where there is no limit."""

    tokens: int | None
    requests: int | None
    num_open: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What `reserve` replied: what was lacking (empty if nothing), for how long, what is left."""

    lacking: str
    wait_ms: int
    left: Left

    @property
    def is_forgotten(self) -> bool:
        """The server has lost the bucket; ask again with what the ledger says is left."""
        return self.lacking == "forgotten"


def reserve(
    tenant_id: str,
    request_id: str,
    num_tokens: int,
    allowance: Allowance,
    remembered: Left | None = None,
) -> FunctionCall:
    """Reserve so many tokens, a request and a place. `remembered`: what the ledger says is left."""
    limits = (
        allowance.tokens_per_minute,
        allowance.requests_per_minute,
        allowance.max_concurrent,
    )
    left = (None, None) if remembered is None else (remembered.tokens, remembered.requests)
    optional = ["" if value is None else value for value in (*limits, *left)]
    args = (request_id, allowance.bucket, num_tokens, LEASE_MS, *optional)
    return FunctionCall("reserve", (_bucket(tenant_id), _leases(tenant_id)), args)


def read_answer(reply: Any) -> Answer:
    """What the reply to `reserve` says."""
    word, wait_ms, tokens, requests, num_open = reply
    lacking = word.decode()
    left = Left(None if tokens < 0 else tokens, None if requests < 0 else requests, int(num_open))
    return Answer("" if lacking == "reserved" else lacking, int(wait_ms), left)


def release(tenant_id: str, request_id: str, num_used: int) -> FunctionCall:
    """An open request has ended; only the first release of it counts. Replies 1 or 0."""
    keys = (_bucket(tenant_id), _leases(tenant_id))
    return FunctionCall("release", keys, (request_id, num_used))


def renew(tenant_id: str, request_ids: list[str]) -> FunctionCall:
    """These requests are open still. Replies how many were named."""
    return FunctionCall("renew", (_leases(tenant_id),), (LEASE_MS, *request_ids))


def refusal(answer: Answer, num_tokens: int, allowance: Allowance) -> Exception | None:
    """The error that tells the caller which of its limits is used up; None if none is."""
    if answer.lacking == "too_large":
        return ReservationTooLarge(
            f"The request may use {num_tokens} tokens and the limit is "
            f"{allowance.tokens_per_minute} per minute. Ask for a shorter output."
        )
    if answer.lacking == "concurrent":
        return QuotaExceeded(
            f"Limit {allowance.max_concurrent} requests at once, open {answer.left.num_open}. "
            "Try again when one has ended.",
            retry_after_ms=CONCURRENT_WAIT_MS,
        )
    if answer.lacking == "requests":
        limit = allowance.requests_per_minute
        return QuotaExceeded(
            f"Limit {limit} requests per minute, used {limit}, requested 1. "
            f"Try again in {answer.wait_ms} ms.",
            retry_after_ms=answer.wait_ms,
        )
    if answer.lacking == "tokens":
        limit, left = allowance.tokens_per_minute or 0, answer.left.tokens or 0
        return QuotaExceeded(
            f"Limit {limit} tokens per minute, used {limit - left}, requested {num_tokens}. "
            f"Try again in {answer.wait_ms} ms.",
            retry_after_ms=answer.wait_ms,
        )
    return None


def headers(allowance: Allowance, left: Left) -> dict[str, str]:
    """The rate-limit headers that tell it, in OpenAI's names."""
    told = {}
    for name, limit, remaining in (
        ("requests", allowance.requests_per_minute, left.requests),
        ("tokens", allowance.tokens_per_minute, left.tokens),
    ):
        if limit is not None and remaining is not None:
            told[f"x-ratelimit-limit-{name}"] = str(limit)
            told[f"x-ratelimit-remaining-{name}"] = str(max(0, remaining))
            told[f"x-ratelimit-reset-{name}"] = duration(60_000 * (limit - remaining) / limit)
    if allowance.max_concurrent is not None:
        told["x-ratelimit-limit-concurrent"] = str(allowance.max_concurrent)
        told["x-ratelimit-remaining-concurrent"] = str(
            max(0, allowance.max_concurrent - left.num_open)
        )
    return told


def duration(milliseconds: float) -> str:
    """A time as Go writes it: 12ms, 1.5s, 6m0s."""
    whole_ms = max(0, round(milliseconds))
    if whole_ms < 1000:
        return f"{whole_ms}ms"
    minutes, rest_ms = divmod(whole_ms, 60_000)
    seconds = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _bucket(tenant_id: str) -> str:
    return f"{{{tenant_id}}}:bucket"


def _leases(tenant_id: str) -> str:
    return f"{{{tenant_id}}}:leases"
