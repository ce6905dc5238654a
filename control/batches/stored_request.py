"""What PostgreSQL knows of an item's request: nothing yet, that it is held, or how it ended.

This, and not what was heard through Redis, is where a line's result comes from: the replica
stored the words in the transaction that charged for them.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of
from control.metering.output_scores import unpack_scores
from control.protocol.responses import FinishedChoice
from engine.interface.generation_delta import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request's row. `is_held` until it ended; `error` is the code of a bad end."""

    is_held: bool
    error: str | None
    usage: Usage
    choices: tuple[FinishedChoice, ...]


async def read_stored(connection: AsyncConnection, request_id: str) -> StoredRequest | None:
    """The request, or None if no such request was ever accepted."""
    key = {"created_at": created_at_of(request_id), "request_id": request_id}
    result = await connection.execute(
        text(
            """
            SELECT r.state = 'held', r.error_code, u.prompt_tokens, u.completion_tokens,
                   u.cached_tokens
            FROM requests r
            LEFT JOIN usage_events u USING (created_at, request_id)
            WHERE r.created_at = :created_at AND r.request_id = :request_id
            """
        ),
        key,
    )
    row = result.one_or_none()
    if row is None:
        return None
    is_held, error, prompt_tokens, completion_tokens, cached_tokens = row
    if is_held:
        return StoredRequest(True, None, Usage(0, 0), ())
    outputs = await connection.execute(
        text(
            """
            SELECT choice, text, finish_reason, token_ids, scores FROM request_outputs
            WHERE created_at = :created_at AND request_id = :request_id
              AND finish_reason IS NOT NULL
            ORDER BY choice
            """
        ),
        key,
    )
    usage = Usage(prompt_tokens, completion_tokens, cached_tokens)
    return StoredRequest(False, error, usage, tuple(_choice(row) for row in outputs))


def _choice(row: Row[Any]) -> FinishedChoice:
    choice, words, finish_reason, token_ids, packed = tuple(row)
    scores = unpack_scores(packed)
    return FinishedChoice(
        choice,
        bytes(words).decode(),
        FinishReason(finish_reason),
        tuple(token_ids),
        scores.logprobs,
        scores.prompt_logprobs,
    )
