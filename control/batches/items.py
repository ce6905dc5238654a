"""The lines of a batch under lease.

A claim raises `epoch`, and every later write names the epoch that its claim got: a worker that
was away too long writes nothing, whatever it believes. The request id is minted by the first
claim and kept, so that a line is one request however many workers carry it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

LEASE_S = 20


@dataclass(frozen=True, slots=True)
class Item:
    """A claimed line. `body` is the request's JSON as it was sent."""

    batch_id: str
    line: int
    epoch: int
    custom_id: str
    body: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class ItemResult:
    """How a line ended: an HTTP-like answer, or an `error` (code and message) without one."""

    status_code: int | None = None
    response: bytes | None = None
    error: str | None = None

    @property
    def state(self) -> str:
        """The item's terminal state."""
        return "completed" if self.status_code == 200 else "failed"


# Both halves lock what they find and skip what others hold, so claims never wait and never
# meet. What is locked and not taken is free again at the commit.
_CLAIM = text(
    """
    WITH unclaimed AS (
        SELECT line FROM batch_items WHERE batch_id = :batch_id AND state = 'available'
        ORDER BY line LIMIT :count FOR UPDATE SKIP LOCKED
    ), lapsed AS (
        SELECT line FROM batch_items
        WHERE batch_id = :batch_id AND state = 'running' AND leased_until < now()
        ORDER BY line LIMIT :count FOR UPDATE SKIP LOCKED
    ), due AS (
        SELECT line, row_number() OVER (ORDER BY line) AS place
        FROM (SELECT line FROM lapsed UNION ALL SELECT line FROM unclaimed) AS both_kinds
        ORDER BY line LIMIT :count
    )
    UPDATE batch_items i
    SET state = 'running', epoch = i.epoch + 1,
        leased_until = now() + make_interval(secs => :lease_s),
        request_id = coalesce(i.request_id, (CAST(:request_ids AS text[]))[due.place])
    FROM due WHERE i.batch_id = :batch_id AND i.line = due.line
    RETURNING i.batch_id, i.line, i.epoch, i.custom_id, i.body, i.request_id
    """
)


async def claim_items(
    connection: AsyncConnection, batch_id: str, request_ids: Sequence[str]
) -> list[Item]:
    """Lease up to as many lines as there are fresh request ids, first lines first."""
    rows = await connection.execute(
        _CLAIM,
        {
            "batch_id": batch_id,
            "count": len(request_ids),
            "request_ids": list(request_ids),
            "lease_s": LEASE_S,
        },
    )
    return sorted((_item(row) for row in rows), key=lambda item: item.line)


async def renew_leases(connection: AsyncConnection, items: Sequence[Item]) -> frozenset[int]:
    """Extend the leases. Returns the lines that are still ours."""
    rows = await connection.execute(
        text(
            """
            UPDATE batch_items i SET leased_until = now() + make_interval(secs => :lease_s)
            FROM unnest(CAST(:batch_ids AS text[]), CAST(:lines AS integer[]),
                        CAST(:epochs AS integer[])) AS held (batch_id, line, epoch)
            WHERE i.batch_id = held.batch_id AND i.line = held.line AND i.epoch = held.epoch
              AND i.state = 'running'
            RETURNING i.line
            """
        ),
        _held(items) | {"lease_s": LEASE_S},
    )
    return frozenset(row.line for row in rows)


async def release_items(connection: AsyncConnection, items: Sequence[Item]) -> int:
    """Give leases back at once; the requests live on for whoever claims next."""
    result = await connection.execute(
        text(
            """
            UPDATE batch_items i SET state = 'available', leased_until = NULL
            FROM unnest(CAST(:batch_ids AS text[]), CAST(:lines AS integer[]),
                        CAST(:epochs AS integer[])) AS held (batch_id, line, epoch)
            WHERE i.batch_id = held.batch_id AND i.line = held.line AND i.epoch = held.epoch
              AND i.state = 'running'
            """
        ),
        _held(items),
    )
    return result.rowcount


async def renew_request(connection: AsyncConnection, item: Item, request_id: str) -> bool:
    """Let the line be another request, because its first one ended through no fault of its own.

    False if the item is no longer ours.
    """
    result = await connection.execute(
        text(
            """
            UPDATE batch_items SET request_id = :new_request_id
            WHERE batch_id = :batch_id AND line = :line AND epoch = :epoch AND state = 'running'
              AND request_id = :request_id
            """
        ),
        _named(item) | {"new_request_id": request_id},
    )
    return result.rowcount == 1


async def end_item(connection: AsyncConnection, item: Item, result: ItemResult) -> bool:
    """Write how the line ended. False, and nothing is written, if the item is no longer ours."""
    written = await connection.execute(
        text(
            """
            UPDATE batch_items
            SET state = :state, leased_until = NULL, status_code = :status_code,
                response = :response, error = CAST(:error AS jsonb), ended_at = now()
            WHERE batch_id = :batch_id AND line = :line AND epoch = :epoch AND state = 'running'
              AND request_id = :request_id
            """
        ),
        _named(item)
        | {
            "state": result.state,
            "status_code": result.status_code,
            "response": result.response,
            "error": result.error,
        },
    )
    return written.rowcount == 1


def _named(item: Item) -> dict[str, str | int | bytes | None]:
    return {
        "batch_id": item.batch_id,
        "line": item.line,
        "epoch": item.epoch,
        "request_id": item.request_id,
    }


def _held(items: Sequence[Item]) -> dict[str, list[str] | list[int] | int]:
    return {
        "batch_ids": [item.batch_id for item in items],
        "lines": [item.line for item in items],
        "epochs": [item.epoch for item in items],
    }


def _item(row: Row[Any]) -> Item:
    return Item(*tuple(row))
