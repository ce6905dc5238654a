"""What moves a batch from state to state, for the worker that carries it.

Every move locks the batch's row first, checks the state it starts from, and is one transaction.
A worker that comes late finds another state and changes nothing. The locks are always taken in
one order, the batch before its items, so that no two moves wait for each other in a ring.
"""

from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.batches.batch import BatchStatus
from control.batches.endings import BATCH_EXPIRED
from control.batches.store import fail_unstarted
from control.batches.validation import InputLine, LineFault
from control.files.files import NewFile, insert_file

COPY_LIMIT_S = 50


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """What a worker must know of the batch that it carries.

    Paused, because its tenant is suspended, it is not to be worked on: what runs may end.
    """

    batch_id: str
    tenant_id: str
    key_id: str
    status: BatchStatus
    endpoint: str
    input_file_id: str
    model: str | None
    total: int
    expires_at: datetime
    is_past_window: bool
    is_paused: bool


async def read_open(connection: AsyncConnection, batch_id: str) -> OpenBatch | None:
    """The batch, or None if it has ended or never was."""
    result = await connection.execute(
        text(
            """
            SELECT batch_id, tenant_id, key_id, status, endpoint, input_file_id, model,
                   total, expires_at, expires_at <= now(),
                   t.suspended_at IS NOT NULL AND expires_at > now()
                       AND status IN ('validating', 'in_progress')
            FROM batches JOIN tenants t USING (tenant_id)
            WHERE batch_id = :batch_id
              AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
            """
        ),
        {"batch_id": batch_id},
    )
    row = result.one_or_none()
    return None if row is None else _open_batch(row)


async def refuse_input(
    connection: AsyncConnection, batch_id: str, faults: Sequence[LineFault]
) -> bool:
    """validating -> failed, saying why. False if it was not validating any more."""
    errors = {"object": "list", "data": [fault.as_object() for fault in faults]}
    result = await connection.execute(
        text(
            """
            UPDATE batches
            SET status = 'failed', failed_at = now(), errors = CAST(:errors AS jsonb)
            WHERE batch_id = :batch_id AND status = 'validating'
            """
        ),
        {"batch_id": batch_id, "errors": msgspec.json.encode(errors).decode()},
    )
    return result.rowcount == 1


async def accept_input(
    connection: AsyncConnection, batch_id: str, model: str, lines: AsyncIterable[InputLine]
) -> bool:
    """validating -> in_progress, with an item for every line. False if it was not validating."""
    if not await _lock(connection, batch_id, BatchStatus.VALIDATING):
        return False
    # The lines come from the file store, at its speed.
    await connection.execute(text(f"SET LOCAL statement_timeout = '{COPY_LIMIT_S}s'"))
    total = await _copy_items(connection, batch_id, lines)
    await connection.execute(
        text(
            """
            UPDATE batches
            SET status = 'in_progress', in_progress_at = now(), model = :model, total = :total
            WHERE batch_id = :batch_id
            """
        ),
        {"batch_id": batch_id, "model": model, "total": total},
    )
    return True


async def expire_unstarted(connection: AsyncConnection, batch_id: str) -> None:
    """After the window: end what never ran. What runs is for its worker to stop."""
    if await _lock(connection, batch_id, BatchStatus.IN_PROGRESS):
        await fail_unstarted(connection, batch_id, BATCH_EXPIRED)


async def begin_finalizing(connection: AsyncConnection, batch_id: str) -> bool:
    """in_progress -> finalizing, if every item has ended."""
    if not await _lock(connection, batch_id, BatchStatus.IN_PROGRESS):
        return False
    if await num_unended(connection, batch_id):
        return False
    await connection.execute(
        text(
            """
            UPDATE batches SET status = 'finalizing', finalizing_at = now()
            WHERE batch_id = :batch_id
            """
        ),
        {"batch_id": batch_id},
    )
    return True


async def num_unended(connection: AsyncConnection, batch_id: str) -> int:
    """Items without a result."""
    count = await connection.scalar(
        text(
            """
            SELECT count(*) FROM batch_items
            WHERE batch_id = :batch_id AND state IN ('available', 'running')
            """
        ),
        {"batch_id": batch_id},
    )
    assert isinstance(count, int)
    return count


async def end_batch(
    connection: AsyncConnection, batch: OpenBatch, output: NewFile | None, errors: NewFile | None
) -> bool:
    """finalizing -> completed or expired, or cancelling -> cancelled, with its files.

    False, and no file is known, if another worker was faster.
    """
    if not await _lock(connection, batch.batch_id, batch.status):
        return False
    for file in (output, errors):
        if file is not None:
            await insert_file(connection, file)
    await connection.execute(
        text(
            """
            UPDATE batches b
            SET status = ending.status, output_file_id = :output, error_file_id = :errors,
                completed_at = CASE ending.status WHEN 'completed' THEN now() END,
                expired_at = CASE ending.status WHEN 'expired' THEN now() END,
                cancelled_at = CASE ending.status WHEN 'cancelled' THEN now() END
            FROM (
                SELECT CASE
                    WHEN :status = 'cancelling' THEN 'cancelled'
                    WHEN EXISTS (SELECT 1 FROM batch_items i WHERE i.batch_id = :batch_id
                                 AND i.error ->> 'code' = 'batch_expired') THEN 'expired'
                    ELSE 'completed' END AS status
            ) ending
            WHERE b.batch_id = :batch_id
            """
        ),
        {
            "batch_id": batch.batch_id,
            "status": str(batch.status),
            "output": None if output is None else output.file_id,
            "errors": None if errors is None else errors.file_id,
        },
    )
    return True


async def _lock(connection: AsyncConnection, batch_id: str, status: BatchStatus) -> bool:
    """Lock the batch's row. False if it is not in that state."""
    found = await connection.scalar(
        text("SELECT status FROM batches WHERE batch_id = :batch_id FOR UPDATE"),
        {"batch_id": batch_id},
    )
    return bool(found == status)


async def _copy_items(
    connection: AsyncConnection, batch_id: str, lines: AsyncIterable[InputLine]
) -> int:
    """COPY: fifty thousand rows in a tenth of a second. Returns how many there were."""
    raw = await connection.get_raw_connection()
    driver = raw.driver_connection
    assert driver is not None
    total = 0
    async with driver.cursor() as cursor:
        columns = "batch_items (batch_id, line, custom_id, body)"
        async with cursor.copy(f"COPY {columns} FROM STDIN") as copy:
            async for line in lines:
                await copy.write_row((batch_id, line.number, line.custom_id, line.body))
                total += 1
    return total


def _open_batch(row: Row[Any]) -> OpenBatch:
    batch_id, tenant_id, key_id, status, *rest = tuple(row)
    return OpenBatch(batch_id, tenant_id, key_id, BatchStatus(status), *rest)
