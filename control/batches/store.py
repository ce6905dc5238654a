"""The rows of batches, for those who ask: create, find, list, cancel.

Counts and usage are always computed from the items and the ledger, so they cannot drift from
what was done. What moves a batch onward is in `lifecycle`.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.batches.batch import (
    WINDOWS_S,
    Batch,
    BatchMoments,
    BatchProgress,
    BatchStatus,
    is_batch_id,
)
from control.batches.endings import BATCH_CANCELLED, Unexecuted
from control.errors import Conflict, NotFound
from control.files.files import MAX_SHOWN_ID, is_file_id, no_such_file
from engine.interface.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a caller asks for, checked."""

    batch_id: str
    tenant_id: str
    key_id: str
    endpoint: str
    completion_window: str
    input_file_id: str
    metadata: dict[str, str]


# The ledger has no index by request id alone; a tenant's rows of the batch's days have one.
_SELECT = """
    SELECT b.batch_id, b.tenant_id, b.key_id, b.status, b.endpoint, b.completion_window,
           b.input_file_id, b.output_file_id, b.error_file_id, b.model, b.metadata, b.errors,
           b.created_at, b.expires_at, b.in_progress_at, b.finalizing_at, b.completed_at,
           b.failed_at, b.expired_at, b.cancelling_at, b.cancelled_at,
           b.total, counts.completed, counts.failed,
           usage.input_tokens, usage.cached_tokens, usage.output_tokens
    FROM batches b
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE i.state = 'completed') AS completed,
               count(*) FILTER (WHERE i.state = 'failed') AS failed
        FROM batch_items i WHERE i.batch_id = b.batch_id
    ) counts
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(u.prompt_tokens), 0)::bigint AS input_tokens,
               coalesce(sum(u.cached_tokens), 0)::bigint AS cached_tokens,
               coalesce(sum(u.completion_tokens), 0)::bigint AS output_tokens
        FROM batch_items i
        JOIN usage_events u ON u.request_id = i.request_id AND u.tenant_id = b.tenant_id
                           AND u.created_at >= b.created_at - interval '1 minute'
                           AND u.created_at <= b.expires_at + interval '1 day'
        WHERE i.batch_id = b.batch_id AND i.state IN ('completed', 'failed')
    ) usage
"""


async def create_batch(connection: AsyncConnection, batch: NewBatch) -> Batch:
    """Write the batch's row. Raises NotFound if the input file is not the tenant's to read."""
    if not is_file_id(batch.input_file_id):
        raise no_such_file(batch.input_file_id, "input_file_id")
    purpose = await connection.scalar(
        text(
            """
            SELECT purpose FROM files
            WHERE file_id = :file_id AND tenant_id = :tenant_id
              AND deleted_at IS NULL AND expires_at > now()
            FOR SHARE
            """
        ),
        {"file_id": batch.input_file_id, "tenant_id": batch.tenant_id},
    )
    if purpose is None:
        raise no_such_file(batch.input_file_id, "input_file_id")
    if purpose != "batch":
        raise InvalidRequest(
            f"{batch.input_file_id} has the purpose {purpose!r}; a batch reads files that were "
            "uploaded with the purpose 'batch'.",
            param="input_file_id",
        )
    await connection.execute(
        text(
            """
            INSERT INTO batches (batch_id, tenant_id, key_id, endpoint, completion_window,
                                 input_file_id, metadata, expires_at)
            VALUES (:batch_id, :tenant_id, :key_id, :endpoint, :completion_window,
                    :input_file_id, CAST(:metadata AS jsonb),
                    now() + make_interval(secs => :window_s))
            """
        ),
        {
            "batch_id": batch.batch_id,
            "tenant_id": batch.tenant_id,
            "key_id": batch.key_id,
            "endpoint": batch.endpoint,
            "completion_window": batch.completion_window,
            "input_file_id": batch.input_file_id,
            "metadata": msgspec.json.encode(batch.metadata).decode(),
            "window_s": WINDOWS_S[batch.completion_window],
        },
    )
    return await find_batch(connection, batch.tenant_id, batch.batch_id)


async def find_batch(connection: AsyncConnection, tenant_id: str, batch_id: str) -> Batch:
    """The tenant's batch. Raises NotFound for one that is not there, or not theirs."""
    row = None
    if is_batch_id(batch_id):
        result = await connection.execute(
            text(f"{_SELECT} WHERE b.batch_id = :batch_id AND b.tenant_id = :tenant_id"),
            {"batch_id": batch_id, "tenant_id": tenant_id},
        )
        row = result.one_or_none()
    if row is None:
        raise _no_such_batch(batch_id)
    return _batch(row)


async def list_batches(
    connection: AsyncConnection, tenant_id: str, limit: int, after: str | None
) -> tuple[list[Batch], bool]:
    """One page, newest first by (created_at, id), and whether there are more.

    Raises InvalidRequest for an `after` that names no batch of the tenant.
    """
    values: dict[str, str | int | datetime | None] = {"tenant_id": tenant_id, "limit": limit + 1}
    beyond = ""
    if after is not None:
        values["cursor_at"] = await _created_at(connection, tenant_id, after)
        values["cursor_id"] = after
        beyond = "AND (b.created_at, b.batch_id) < (:cursor_at, :cursor_id)"
    rows = await connection.execute(
        text(
            f"""
            {_SELECT} WHERE b.tenant_id = :tenant_id {beyond}
            ORDER BY b.created_at DESC, b.batch_id DESC LIMIT :limit
            """
        ),
        values,
    )
    batches = [_batch(row) for row in rows]
    return batches[:limit], len(batches) > limit


async def cancel_batch(connection: AsyncConnection, tenant_id: str, batch_id: str) -> Batch:
    """Stop the batch: what has not started fails at once, what runs is for the worker to stop.

    Asking twice is harmless. Raises NotFound, or Conflict when the batch has ended or ends now.
    """
    status = None
    if is_batch_id(batch_id):
        status = await connection.scalar(
            text(
                """
                SELECT status FROM batches
                WHERE batch_id = :batch_id AND tenant_id = :tenant_id FOR UPDATE
                """
            ),
            {"batch_id": batch_id, "tenant_id": tenant_id},
        )
    if status is None:
        raise _no_such_batch(batch_id)
    if status in {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS}:
        await connection.execute(
            text(
                """
                UPDATE batches SET status = 'cancelling', cancelling_at = now()
                WHERE batch_id = :batch_id
                """
            ),
            {"batch_id": batch_id},
        )
        await fail_unstarted(connection, batch_id, BATCH_CANCELLED)
    elif status != BatchStatus.CANCELLING:
        raise Conflict(f"The batch {batch_id} is {status} and cannot be cancelled.")
    return await find_batch(connection, tenant_id, batch_id)


async def fail_unstarted(connection: AsyncConnection, batch_id: str, reason: Unexecuted) -> None:
    """End the items whose request never ran. The caller holds the batch's row lock.

    An item that was claimed before keeps its request id, and that request may live: a worker
    must look at it first.
    """
    await connection.execute(
        text(
            """
            UPDATE batch_items
            SET state = 'failed', error = CAST(:error AS jsonb), ended_at = now()
            WHERE batch_id = :batch_id AND state = 'available' AND request_id IS NULL
            """
        ),
        {"batch_id": batch_id, "error": reason.as_json()},
    )


async def _created_at(connection: AsyncConnection, tenant_id: str, after: str) -> datetime:
    created_at = None
    if is_batch_id(after):
        created_at = await connection.scalar(
            text(
                "SELECT created_at FROM batches WHERE batch_id = :after AND tenant_id = :tenant_id"
            ),
            {"after": after, "tenant_id": tenant_id},
        )
    if created_at is None:
        raise InvalidRequest(
            f"There is no batch {after[:MAX_SHOWN_ID]!a} to go on after.", param="after"
        )
    assert isinstance(created_at, datetime)
    return created_at


def _no_such_batch(batch_id: str) -> NotFound:
    return NotFound(f"There is no batch {batch_id[:MAX_SHOWN_ID]!a}.", param="batch_id")


def _batch(row: Row[Any]) -> Batch:
    return Batch(
        batch_id=row.batch_id,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        status=BatchStatus(row.status),
        endpoint=row.endpoint,
        completion_window=row.completion_window,
        input_file_id=row.input_file_id,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        model=row.model,
        metadata=row.metadata,
        errors=row.errors,
        moments=BatchMoments(*tuple(row)[12:21]),
        progress=BatchProgress(*tuple(row)[21:]),
    )
