"""Giving up reservations that nobody will settle: the last line of "exactly one ending".

A held row whose request Redis does not know (never queued because the gateway died between the
two, or lost with Redis) ends as failed, unbilled. A row whose request Redis knows is left to
the dispatcher and its replica, however old it is.
"""

from collections.abc import Sequence

import redis
from sqlalchemy import Connection, text

from control.metering.settlement import Settlement, settle
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import Usage

LEAST_AGE_S = 60
MAX_GROUP = 500

_OLD_HELD = text(
    """
    SELECT request_id, model, attempt FROM requests
    WHERE state = 'held' AND created_at < now() - make_interval(secs => :age_s)
    ORDER BY created_at LIMIT :limit
    """
)


def expire_lost(
    connection: Connection, client: redis.Redis, least_age_s: float = LEAST_AGE_S
) -> int:
    """End held requests older than `least_age_s` that Redis does not know. Returns how many."""
    rows = connection.execute(_OLD_HELD, {"age_s": least_age_s, "limit": MAX_GROUP}).all()
    lost = _unknown_to_redis(client, [(row.request_id, row.model, row.attempt) for row in rows])
    if not lost:
        return 0
    settlements = [
        Settlement(request_id, attempt, Usage(0, 0), error="request_lost")
        for request_id, attempt in lost
    ]
    return len(settle(connection, settlements))


def _unknown_to_redis(
    client: redis.Redis, rows: Sequence[tuple[str, str, int]]
) -> list[tuple[str, int]]:
    pipeline = client.pipeline(transaction=False)
    for request_id, model, _ in rows:
        pipeline.exists(ModelKeys(model).live(request_id))
    found = pipeline.execute() if rows else []
    return [
        (request_id, attempt)
        for (request_id, _, attempt), is_known in zip(rows, found, strict=True)
        if not is_known
    ]
