"""Giving up reservations that nobody will settle: the last line of "exactly one ending".

A held row whose request Redis does not know (never queued because the gateway died between the
two, or lost with Redis) ends as failed, unbilled, once Redis has not known it for a minute: long
enough for a replica that still has it to settle it from memory. A row whose request Redis knows
is left to the dispatcher and its replica, however old it is.
"""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import redis
from sqlalchemy import Connection, text

from control.faults import fault_point
from control.metering.settlement import Settlement, settle
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import Usage

LEAST_AGE_S = 15.0
UNKNOWN_FOR_S = 60.0
PAGE = 500

_HELD = text(
    """
    SELECT created_at, request_id, model, attempt FROM requests
    WHERE state = 'held' AND created_at < now() - make_interval(secs => :age_s)
      AND (created_at, request_id) > (:created_at, :request_id)
    ORDER BY created_at, request_id LIMIT :page
    """
)


class Expiry:
    """Remembers since when Redis has not known each held request.

    A request younger than `least_age_s` may be on its way from its row to the queue.
    """

    def __init__(
        self,
        unknown_for_s: float = UNKNOWN_FOR_S,
        least_age_s: float = LEAST_AGE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unknown_for_s = unknown_for_s
        self._least_age_s = least_age_s
        self._monotonic = monotonic
        self._unknown_since: dict[str, float] = {}

    def expire(self, connection: Connection, client: redis.Redis) -> int:
        """End the requests whose time has come. Returns how many."""
        now = self._monotonic()
        unknown = {
            request_id: attempt
            for page in self._held_pages(connection)
            for request_id, attempt in _unknown_to(client, page)
        }
        self._unknown_since = {
            request_id: self._unknown_since.get(request_id, now) for request_id in unknown
        }
        settlements = [
            Settlement(request_id, unknown[request_id], Usage(0, 0), error="request_lost")
            for request_id, since in self._unknown_since.items()
            if now - since >= self._unknown_for_s
        ]
        if not settlements:
            return 0
        num_ended = len(settle(connection, settlements))
        fault_point("expire.before_commit")
        return num_ended

    def _held_pages(self, connection: Connection) -> Iterator[list[tuple[str, str, int]]]:
        last = {"created_at": datetime(1970, 1, 1, tzinfo=UTC), "request_id": ""}
        while True:
            values = {**last, "age_s": self._least_age_s, "page": PAGE}
            rows = connection.execute(_HELD, values).all()
            if not rows:
                return
            yield [(row.request_id, row.model, row.attempt) for row in rows]
            last = {"created_at": rows[-1].created_at, "request_id": rows[-1].request_id}


def _unknown_to(client: redis.Redis, rows: list[tuple[str, str, int]]) -> Iterator[tuple[str, int]]:
    pipeline = client.pipeline(transaction=False)
    for request_id, model, _ in rows:
        pipeline.exists(ModelKeys(model).live(request_id))
    for (request_id, _, attempt), is_known in zip(rows, pipeline.execute(), strict=True):
        if not is_known:
            yield request_id, attempt
