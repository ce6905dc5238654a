"""The lines of a batch's output and error files, in the order of its input.

An item that completed is one line of the output file, any other one line of the error file, so
the two together hold every custom_id exactly once.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from control.protocol.responses import to_json

ROWS_PER_READ = 200

Ending = Literal["completed", "failed"]


class ConservationBroken(Exception):
    """Lines written and items of the batch differ in number: nothing may be published."""


@dataclass(frozen=True, slots=True)
class EndedItem:
    """What the row of an ended item says. `response` and `error` are JSON, one of them None."""

    line: int
    custom_id: str
    request_id: str | None
    status_code: int | None
    response: bytes | None
    error: str | None


async def result_lines(
    database: AsyncEngine, batch_id: str, ending: Ending
) -> AsyncIterator[bytes]:
    """Every line of one kind, read a few at a time so that memory and locks stay small."""
    last_line = 0
    while True:
        async with database.connect() as connection:
            rows = await connection.execute(
                text(
                    """
                    SELECT line, custom_id, request_id, status_code, response,
                           CAST(error AS text)
                    FROM batch_items
                    WHERE batch_id = :batch_id AND state = :ending AND line > :last_line
                    ORDER BY line LIMIT :limit
                    """
                ),
                {
                    "batch_id": batch_id,
                    "ending": ending,
                    "last_line": last_line,
                    "limit": ROWS_PER_READ,
                },
            )
            items = [EndedItem(*tuple(row)) for row in rows]
        for item in items:
            last_line = item.line
            yield result_line(batch_id, item)
        if len(items) < ROWS_PER_READ:
            return


def result_line(batch_id: str, item: EndedItem) -> bytes:
    """One line, ending in a newline. It has a response or an error, never both."""
    answer = None
    if item.response is not None:
        answer = {
            "status_code": item.status_code,
            "request_id": f"req_{item.request_id}",
            "body": msgspec.Raw(item.response),
        }
    fields = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{item.line}",
        "custom_id": item.custom_id,
        "response": answer,
        "error": None if item.error is None else msgspec.Raw(item.error.encode()),
    }
    return to_json(fields) + b"\n"
