"""Keys under which a call may be repeated: each stands for the one thing that its first call made.

A key belongs to a tenant and an endpoint. It is claimed in the transaction that writes what it
stands for, so of many calls that race one claims it and the others find whose it is. A claim takes
over a key whose request failed before it said anything (`replaces`), and one that is a day old.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.errors import KeyReused, RequestInProgress
from control.identity.request_id import created_at_of, is_request_id

KEPT_S = 24 * 3600
KEY_REUSED = "This key was used with another body. Use a new key for a new request."
PRUNED_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A call's wish to have its key stand for what it makes.

    `endpoint` is method and path, `body_hash` what the body means. `replaces` is what the key may
    stand for until then.
    """

    tenant_id: str
    endpoint: str
    key: str
    body_hash: bytes
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class KeptKey:
    """What a key stands for: an object of ours, and what its first call was answered."""

    endpoint: str
    body_hash: bytes
    object_id: str
    response: bytes | None


CLAIM = """
    INSERT INTO idempotency_keys AS k (tenant_id, endpoint, key, body_hash, object_id)
    VALUES (:tenant_id, :claimed_endpoint, :key, :body_hash, :object_id)
    ON CONFLICT (tenant_id, key, endpoint) DO UPDATE
    SET body_hash = EXCLUDED.body_hash, object_id = EXCLUDED.object_id, response = NULL,
        created_at = now()
    WHERE k.object_id IN (CAST(:replaces AS text), EXCLUDED.object_id)
       OR k.created_at <= now() - make_interval(secs => :kept_s)
    RETURNING object_id
"""

_CLAIM = text(CLAIM)

_FIND = text(
    """
    SELECT endpoint, body_hash, object_id, response FROM idempotency_keys
    WHERE tenant_id = :tenant_id AND key = :key
      AND created_at > now() - make_interval(secs => :kept_s)
    ORDER BY endpoint
    """
)

_ANSWERED = text(
    """
    UPDATE idempotency_keys SET response = :response
    WHERE tenant_id = :tenant_id AND endpoint = :claimed_endpoint AND key = :key
      AND object_id = :object_id
    """
)

_PRUNE = text(
    """
    DELETE FROM idempotency_keys WHERE ctid IN (
        SELECT ctid FROM idempotency_keys
        WHERE created_at <= now() - make_interval(secs => :kept_s) LIMIT :most)
    RETURNING object_id
    """
)

# Outputs of batches have no key, and are not found.
_FORGET_OUTPUTS = text(
    """
    DELETE FROM request_outputs o
    USING unnest(CAST(:created_at AS timestamptz[]), CAST(:request_id AS text[]))
        AS g (created_at, request_id)
    WHERE o.created_at = g.created_at AND o.request_id = g.request_id
    """
)


def claim_values(claim: KeyClaim, object_id: str) -> dict[str, object]:
    """What `CLAIM` is executed with."""
    return {
        "tenant_id": claim.tenant_id,
        "claimed_endpoint": claim.endpoint,
        "key": claim.key,
        "body_hash": claim.body_hash,
        "object_id": object_id,
        "replaces": claim.replaces,
        "kept_s": KEPT_S,
    }


async def claim_key(connection: AsyncConnection, claim: KeyClaim, object_id: str) -> bool:
    """Let the key stand for the object. False if it stands for another."""
    result = await connection.execute(_CLAIM, claim_values(claim, object_id))
    return result.one_or_none() is not None


async def note_answer(
    connection: AsyncConnection, claim: KeyClaim, object_id: str, response: bytes
) -> None:
    """Keep what the call was answered, for its repetitions."""
    values = claim_values(claim, object_id) | {"response": response}
    await connection.execute(_ANSWERED, values)


async def answered_once(
    connection: AsyncConnection,
    claim: KeyClaim | None,
    object_id: str,
    act: Callable[[], Awaitable[bytes]],
) -> tuple[bytes, bool]:
    """What `act` answers, and whether that was a former call's answer. Raises KeyReused.

    Key, act and answer are one transaction: whoever races waits for it, and an act that fails
    leaves no key.
    """
    if claim is None:
        return await act(), False
    if await claim_key(connection, claim, object_id):
        response = await act()
        await note_answer(connection, claim, object_id, response)
        return response, False
    for kept in await find_key(connection, claim.tenant_id, claim.key):
        if kept.endpoint == claim.endpoint and kept.response is not None:
            if kept.body_hash != claim.body_hash:
                raise KeyReused(KEY_REUSED)
            return kept.response, True
    raise RequestInProgress("The key is being used. Try again shortly.", retry_after_ms=1000)


async def find_key(connection: AsyncConnection, tenant_id: str, key: str) -> Sequence[KeptKey]:
    """What the tenant's key stands for, at each endpoint where it was used."""
    values = {"tenant_id": tenant_id, "key": key, "kept_s": KEPT_S}
    rows = await connection.execute(_FIND, values)
    return [
        KeptKey(
            row.endpoint,
            bytes(row.body_hash),
            row.object_id,
            None if row.response is None else bytes(row.response),
        )
        for row in rows
    ]


def prune_keys(connection: Connection) -> int:
    """Forget keys that are a day old, and what their requests said.

    Returns how many; what is left is for the next round.
    """
    values = {"kept_s": KEPT_S, "most": PRUNED_AT_ONCE}
    pruned = list(connection.execute(_PRUNE, values).scalars())
    requests = [object_id for object_id in pruned if is_request_id(object_id)]
    created = [created_at_of(request_id) for request_id in requests]
    connection.execute(_FORGET_OUTPUTS, {"created_at": created, "request_id": requests})
    return len(pruned)
