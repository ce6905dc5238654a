"""The server-side functions of requests as typed calls; those of quotas are in
`control.admission.bucket`.

A call is a value: its name, keys and arguments. `invoke` and `invoke_async` carry it out, and
load the library when the server does not know it (a fresh or flushed server forgets it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ResponseError

from control.streams.frames import pack_frames
from control.streams.keys import ModelKeys
from control.streams.messages import (
    Charge,
    QueueEntry,
    pack_charge,
    pack_entry,
    pack_request,
    pack_usage,
)
from engine.interface.generation_delta import GenerationDelta
from engine.interface.generation_request import GenerationRequest

_SOURCE = "".join(
    Path(__file__).with_name(name).read_text() for name in ("functions.lua", "buckets.lua")
)
# The functions are named after their own text, so that processes of two releases can share a
# server, each calling the functions that it was written for.
_PREFIX = "headrace_" + sha256(_SOURCE.encode()).hexdigest()[:12]
LIBRARY = _SOURCE.replace("headrace", _PREFIX)

MAX_INBOX = 1024
MAX_FEED = 4096
LOG_LIFE_MS = 600_000
LIVE_SLACK_MS = 600_000

Argument = str | bytes | int
Reply = Any  # redis-py types no reply; each caller below names what its function returns


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a function in `functions.lua` or `buckets.lua`."""

    name: str
    keys: tuple[str, ...]
    args: tuple[Argument, ...]

    @property
    def full_name(self) -> str:
        """The function's name on the server."""
        return f"{_PREFIX}_{self.name}"


@dataclass(frozen=True, slots=True)
class Publication:
    """Consecutive deltas of one request, under the attempt that made them.

    `log_bytes` is how long its log is before them.
    """

    attempt: int
    log_bytes: int
    deltas: tuple[GenerationDelta, ...]
    frames: bytes

    @classmethod
    def of(cls, attempt: int, log_bytes: int, deltas: Sequence[GenerationDelta]) -> "Publication":
        """The deltas, packed."""
        return cls(attempt, log_bytes, tuple(deltas), pack_frames(deltas))

    @property
    def request_id(self) -> str:
        """The request that the deltas belong to."""
        return self.deltas[0].request_id


def enqueue(
    keys: ModelKeys,
    entry: QueueEntry,
    request: GenerationRequest,
    follower_id: str,
    max_queued: int,
) -> FunctionCall:
    """Accept a request. Replies b"queued", b"full", b"unserved" or b"exists"."""
    life_ms = int((entry.deadline_at - entry.arrival) * 1000) + LIVE_SLACK_MS
    return FunctionCall(
        "enqueue",
        (
            keys.live(entry.request_id),
            keys.log(entry.request_id),
            keys.queue(entry.priority_class),
            keys.open,
            keys.serving(entry.weights_digest),
        ),
        (
            entry.request_id,
            pack_entry(entry),
            pack_request(request),
            follower_id,
            max_queued,
            life_ms,
        ),
    )


def assign(
    keys: ModelKeys, token: str, entry: QueueEntry, replica_id: str, charge: Charge
) -> FunctionCall:
    """Give a queued request to a replica, and charge its tenant if that was not done before.

    Replies [b"assigned", attempt, inbox entry id], or one word: not_leader, gone, ended, taken
    or full.
    """
    return FunctionCall(
        "assign",
        (keys.leader, keys.live(entry.request_id), keys.inbox(replica_id), keys.clock),
        (
            token,
            entry.request_id,
            replica_id,
            entry.weights_digest,
            MAX_INBOX,
            entry.tenant_id,
            repr(charge.time_before),
            repr(charge.time_after),
            pack_charge(charge),
        ),
    )


def requeue(
    keys: ModelKeys, token: str, request_id: str, replica_id: str, failures: int
) -> FunctionCall:
    """Put an assigned request back. `token` is empty when its own replica hands it back.

    Replies b"queued", b"not_leader", b"gone", b"ended", b"moved" or b"cancelled".
    """
    return FunctionCall(
        "requeue",
        (keys.leader, keys.live(request_id)),
        (token, request_id, replica_id, failures),
    )


def step(keys: ModelKeys, publications: Sequence[Publication]) -> FunctionCall:
    """Publish one engine step.

    Replies one word for each publication: ok, cancelled (published, but stop), moved, ended or
    gone (the last three: refused).
    """
    names = [keys.open, keys.endings]
    args: list[Argument] = [keys.feed(""), MAX_FEED, LOG_LIFE_MS]
    for publication in publications:
        names += [keys.live(publication.request_id), keys.log(publication.request_id)]
        usage = publication.deltas[-1].usage
        args += [
            publication.attempt,
            publication.log_bytes,
            publication.frames,
            b"" if usage is None else pack_usage(usage),
        ]
    return FunctionCall("step", tuple(names), tuple(args))


def end_unsettled(keys: ModelKeys, ending: Publication, settlement: bytes) -> FunctionCall:
    """Publish a request's ending while its packed settlement waits for the ledger.

    Replies as `step` does, with one word. Nothing waits unless it is ok or cancelled.
    """
    call = step(keys, [ending])
    return FunctionCall("end_unsettled", (*call.keys, keys.unsettled), (*call.args, settlement))


def set_clock(
    keys: ModelKeys, token: str, times: Mapping[str, float], endings: Sequence[str]
) -> FunctionCall:
    """Note virtual times by tenant that these endings have changed. Replies set or not_leader."""
    pairs = [word for tenant_id, at in times.items() for word in (tenant_id, repr(at))]
    return FunctionCall(
        "set_clock",
        (keys.leader, keys.clock, keys.endings),
        (token, len(times), *pairs, *endings),
    )


def cancel(keys: ModelKeys, request_id: str, error: str = "cancelled") -> FunctionCall:
    """Cancel a request: its replica, or the dispatcher while it is queued, will end it so.

    Replies b"assigned", b"queued", b"cancelled" (already), b"ended" or b"gone".
    """
    return FunctionCall("cancel", (keys.live(request_id),), (request_id, keys.inbox(""), error))


def leave(keys: ModelKeys, request_id: str, follower_id: str, grace_ms: int) -> FunctionCall:
    """Take a follower away. A request that nobody else follows is kept for the grace, or cancelled.

    Replies b"followed", b"kept", b"ended" or b"gone", or as `cancel` does.
    """
    args = (request_id, keys.inbox(""), "cancelled", follower_id, grace_ms)
    return FunctionCall("leave", (keys.live(request_id),), args)


def lapse(keys: ModelKeys, request_id: str, followers: str) -> FunctionCall:
    """Cancel a request whose followers, in the words of its live hash, were all found dead.

    Replies b"followed" or b"kept" if it is not to be cancelled, else as `cancel` does.
    """
    args = (request_id, keys.inbox(""), "cancelled", followers)
    return FunctionCall("lapse", (keys.live(request_id),), args)


def seize(keys: ModelKeys, request_id: str, error: str) -> FunctionCall:
    """Take a request from whoever has it, in order to end it with the error code.

    Replies [b"seized", attempt, packed request], [b"ended"] or [b"gone"].
    """
    return FunctionCall("seize", (keys.live(request_id),), (error,))


def follow(keys: ModelKeys, request_id: str, follower_id: str) -> FunctionCall:
    """Add a follower. Replies [b"following", log length in bytes] or [b"gone"]."""
    return FunctionCall("follow", (keys.live(request_id), keys.log(request_id)), (follower_id,))


def lead(keys: ModelKeys, token: str, lease_ms: int) -> FunctionCall:
    """Keep or take the lead. Replies b"leading" or b"standby"."""
    return FunctionCall("lead", (keys.leader,), (token, lease_ms))


def invoke(client: redis.Redis, call: FunctionCall) -> Reply:
    """Carry out the call."""
    try:
        return client.fcall(call.full_name, len(call.keys), *call.keys, *call.args)
    except ResponseError as error:
        if not _is_unknown(error):
            raise
        client.function_load(LIBRARY, replace=True)
        return client.fcall(call.full_name, len(call.keys), *call.keys, *call.args)


async def invoke_async(client: redis.asyncio.Redis, call: FunctionCall) -> Reply:
    """Carry out the call on an asynchronous client."""
    try:
        return await client.fcall(call.full_name, len(call.keys), *call.keys, *call.args)
    except ResponseError as error:
        if not _is_unknown(error):
            raise
        await client.function_load(LIBRARY, replace=True)
        return await client.fcall(call.full_name, len(call.keys), *call.keys, *call.args)


def _is_unknown(error: ResponseError) -> bool:
    return "function not found" in str(error).lower()
