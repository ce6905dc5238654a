"""A held reservation: the row that says a request was accepted and has not ended."""

from dataclasses import dataclass, field

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of
from engine.interface.generation_request import PriorityClass


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held for one request: its prompt and the most it may say, over all choices.

    `answer_form` is how its answer is told, packed; None if nobody else is to tell it.
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    version: str
    weights_digest: str
    priority_class: PriorityClass
    endpoint: str
    reserved_tokens: int
    prompt_tokens: int
    metadata: dict[str, str] = field(default_factory=dict)
    answer_form: bytes | None = None


_INSERT = text(
    """
    INSERT INTO requests (created_at, request_id, tenant_id, key_id, model, version,
                          weights_digest, priority_class, endpoint, reserved_tokens,
                          prompt_tokens, metadata, answer_form)
    VALUES (:created_at, :request_id, :tenant_id, :key_id, :model, :version,
            :weights_digest, :priority_class, :endpoint, :reserved_tokens,
            :prompt_tokens, CAST(:metadata AS jsonb), :answer_form)
    ON CONFLICT DO NOTHING
    """
)

_GIVE_BACK = text(
    """
    DELETE FROM requests
    WHERE created_at = :created_at AND request_id = :request_id
      AND state = 'held' AND attempt = 1
    """
)


async def hold(connection: AsyncConnection, reservation: Reservation) -> None:
    """Write the reservation. It is held until it is settled, expired or given back.

    One statement, and harmless to repeat when its reply was lost.
    """
    await connection.execute(
        _INSERT,
        {
            "created_at": created_at_of(reservation.request_id),
            "request_id": reservation.request_id,
            "tenant_id": reservation.tenant_id,
            "key_id": reservation.key_id,
            "model": reservation.model,
            "version": reservation.version,
            "weights_digest": reservation.weights_digest,
            "priority_class": reservation.priority_class,
            "endpoint": reservation.endpoint,
            "reserved_tokens": reservation.reserved_tokens,
            "prompt_tokens": reservation.prompt_tokens,
            "metadata": msgspec.json.encode(reservation.metadata).decode(),
            "answer_form": reservation.answer_form,
        },
    )


async def give_back(connection: AsyncConnection, request_id: str) -> None:
    """Forget a reservation whose request was never queued."""
    await connection.execute(
        _GIVE_BACK, {"created_at": created_at_of(request_id), "request_id": request_id}
    )
