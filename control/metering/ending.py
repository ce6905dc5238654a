"""Ending a request that no replica will end: cancelled or expired in the queue, or orphaned.

Whoever calls this takes the request first (a new attempt in Redis, then in PostgreSQL), so that
a replica that still believes it has the request can neither speak for it nor settle it. What
was delivered is in the log, and that is what is billed: the prompt too, once anything was said.
"""

from dataclasses import replace
from typing import cast

import redis
from sqlalchemy import Connection, Engine

from control.faults import fault_point
from control.metering.settlement import (
    Claim,
    Settlement,
    begin_attempt,
    read_ending,
    settle,
)
from control.metering.timings import CancelProof, Timings
from control.streams.frames import unpack_frames
from control.streams.functions import Publication, invoke, seize, step
from control.streams.keys import ModelKeys
from control.streams.messages import unpack_request
from engine.interface.generation_delta import FinishReason, GenerationDelta, Usage
from engine.interface.generation_request import GenerationRequest


def end_request(
    client: redis.Redis,
    database: Engine,
    keys: ModelKeys,
    request_id: str,
    error: str,
    cancel: CancelProof | None = None,
) -> bool:
    """Give the request its one ending with the error code. False if it had one already.

    `cancel` says when that was asked, if somebody did.

    Raises what the stores raise; calling again finishes what was begun.
    """
    while True:
        reply = invoke(client, seize(keys, request_id, error))
        if reply[0] != b"seized":
            return False
        fault_point("end.after_seize")
        attempt, request = int(reply[1]), unpack_request(reply[2])
        log = cast("bytes", client.get(keys.log(request_id)) or b"")
        delivered = list(unpack_frames(log))
        settlement = settlement_of(request, attempt, delivered, error)
        settlement = replace(settlement, timings=Timings(cancel=cancel))
        with database.begin() as connection:
            claim = close_request(connection, settlement)
            ending = read_ending(connection, request_id)
        # Overtaken: Redis has lost moves that PostgreSQL has seen. Each seizure raises the attempt.
        if claim is not Claim.OVERTAKEN:
            break
    fault_point("end.after_commit")
    last = GenerationDelta(
        request_id=request_id,
        choice=0,
        serial=len(delivered),
        offset=sum(len(delta.token_ids) for delta in delivered),
        usage=settlement.usage if ending is None else ending.usage,
        error=error if ending is None else ending.error,
    )
    invoke(client, step(keys, [Publication.of(attempt, len(log), [last])]))
    return claim is Claim.OURS


def close_request(connection: Connection, settlement: Settlement) -> Claim:
    """Settle, after claiming the row unless it is at this attempt already."""
    if settle(connection, [settlement]):
        return Claim.OURS
    claim = begin_attempt(connection, settlement.request_id, settlement.attempt)
    if claim is Claim.OURS:
        settle(connection, [settlement])
    return claim


def settlement_of(
    request: GenerationRequest, attempt: int, delivered: list[GenerationDelta], error: str
) -> Settlement:
    """The settlement of a request that ends with `error` after these deltas."""
    reasons: list[FinishReason | None] = [None] * request.num_choices
    for delta in delivered:
        if delta.finish_reason is not None:
            reasons[delta.choice] = delta.finish_reason
    num_tokens = sum(len(delta.token_ids) for delta in delivered)
    prompt_tokens = request.num_prompt_tokens if delivered else 0
    return Settlement(
        request_id=request.request_id,
        attempt=attempt,
        usage=Usage(prompt_tokens, num_tokens),
        finish_reasons=tuple(reasons),
        error=error,
    )
