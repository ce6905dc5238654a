"""A held reservation: the row that says a request was accepted and has not ended."""

from dataclasses import dataclass, field

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.admission.idempotency import CLAIM, KeyClaim, claim_values
from control.identity.request_id import created_at_of
from engine.interface.generation_request import PriorityClass


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held for one request: its prompt and the most it may say, over all choices.

    `answer_form` is how its answer is told, packed; None if nobody else is to tell it. `claim` is
    the key that is to stand for it.
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
    claim: KeyClaim | None = None


_COLUMNS = """
    INSERT INTO requests (created_at, request_id, tenant_id, key_id, model, version,
                          weights_digest, priority_class, endpoint, reserved_tokens,
                          prompt_tokens, metadata, answer_form)
    SELECT CAST(:created_at AS timestamptz), :request_id, :tenant_id, :key_id, :model, :version,
           :weights_digest, :priority_class, :endpoint, :reserved_tokens,
           :prompt_tokens, CAST(:metadata AS jsonb), CAST(:answer_form AS bytea)
"""

_INSERT = text(_COLUMNS + "ON CONFLICT DO NOTHING")

# The row is written only if the key is ours, in the same statement.
_INSERT_WITH_KEY = text(
    f"""
    WITH claimed AS ({CLAIM}),
    held AS ({_COLUMNS} FROM claimed ON CONFLICT DO NOTHING)
    SELECT count(*) FROM claimed
    """  # noqa: S608 - both parts are written here and in idempotency.py
)

_GIVE_BACK = text(
    """
    WITH given_back AS (
        DELETE FROM requests
        WHERE created_at = :created_at AND request_id = :request_id
          AND state = 'held' AND attempt = 1
        RETURNING request_id
    )
    DELETE FROM idempotency_keys k USING given_back g WHERE k.object_id = g.request_id
    """
)


async def hold(connection: AsyncConnection, reservation: Reservation) -> bool:
    """Write the reservation. It is held until it is settled, expired or given back.

    One statement, and harmless to repeat when its reply was lost. False if its key stands for
    another request; then nothing is written.
    """
    values = {
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
    }
    if reservation.claim is None:
        await connection.execute(_INSERT, values)
        return True
    claim = claim_values(reservation.claim, reservation.request_id)
    claimed = await connection.execute(_INSERT_WITH_KEY, values | claim)
    return bool(claimed.scalar_one())


async def give_back(connection: AsyncConnection, request_id: str) -> None:
    """Forget a reservation whose request was never queued, and the key that stood for it."""
    values = {"created_at": created_at_of(request_id), "request_id": request_id}
    await connection.execute(_GIVE_BACK, values)
