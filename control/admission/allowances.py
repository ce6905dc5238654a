"""Which limits a tenant has for a model, and what the ledger says is left of them."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.admission.bucket import Allowance, Left
from control.identity.quotas import EVERY_MODEL

_LIMITS = text(
    """
    SELECT model, tokens_per_minute, requests_per_minute, max_concurrent FROM quotas
    WHERE tenant_id = :tenant_id AND model IN (:model, :every_model)
    """
)

# Requests of the last minute: what the ended ones used and the open ones hold.
_USED = text(
    """
    SELECT COALESCE(sum(CASE WHEN r.state = 'held' THEN r.reserved_tokens
                             ELSE r.prompt_tokens + r.completion_tokens END), 0) AS tokens,
           count(*) AS requests
    FROM requests r
    WHERE r.tenant_id = :tenant_id
      AND r.created_at > now() - interval '1 minute'
      AND CASE WHEN :bucket = :every_model
               THEN NOT EXISTS (SELECT FROM quotas q WHERE q.tenant_id = r.tenant_id
                                                       AND q.model = r.model)
               ELSE r.model = :bucket END
    """
)


async def read_allowance(connection: AsyncConnection, tenant_id: str, model: str) -> Allowance:
    """The tenant's limits for the model: its own, or else those for every model.

    How much may be open at once counts over all models, and is said with those for every model.
    """
    values = {"tenant_id": tenant_id, "model": model, "every_model": EVERY_MODEL}
    rows = {row.model: row for row in await connection.execute(_LIMITS, values)}
    own, common = rows.get(model), rows.get(EVERY_MODEL)
    limits = own or common
    return Allowance(
        bucket=model if own else EVERY_MODEL,
        tokens_per_minute=limits.tokens_per_minute if limits else None,
        requests_per_minute=limits.requests_per_minute if limits else None,
        max_concurrent=common.max_concurrent if common else None,
    )


async def left_by_ledger(connection: AsyncConnection, tenant_id: str, allowance: Allowance) -> Left:
    """What is left of a minute's limits by the rows of the last minute.

    It may be less than the bucket had, never more: what was used counts as if it were just now.
    """
    values = {"tenant_id": tenant_id, "bucket": allowance.bucket, "every_model": EVERY_MODEL}
    used = (await connection.execute(_USED, values)).one()
    return Left(
        _left(allowance.tokens_per_minute, int(used.tokens)),
        _left(allowance.requests_per_minute, int(used.requests)),
        0,
    )


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)
