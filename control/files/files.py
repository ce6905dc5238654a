"""The rows of files: whose they are, what for, and until when.

A file is seen by its tenant alone: another tenant's id is answered like an id that never was.
The id is also the key of the bytes in the store; a row is written after its bytes are.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.errors import Conflict, NotFound
from control.identity.request_id import NUM_RANDOM_BITS, mint_request_id
from engine.interface.errors import InvalidRequest

MAX_FILE_BYTES = 209_715_200
DEFAULT_LIFE_S = 30 * 86_400
MIN_LIFE_S = 3600
MAX_LIFE_S = 2_592_000
MAX_SHOWN_ID = 64

_FILE_ID = re.compile(r"file-[0-9a-z]{26}")

Purpose = Literal["batch", "batch_output"]
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `filename` is what its uploader called it: data, never a path."""

    file_id: str
    tenant_id: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime

    def as_object(self) -> dict[str, str | int]:
        """The file as the API shows it."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_at.timestamp()),
            "expires_at": int(self.expires_at.timestamp()),
            "filename": self.filename,
            "purpose": self.purpose,
            # Deprecated by OpenAI, still required by the types of its SDKs.
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class NewFile:
    """What is known of a file whose bytes are in the store already."""

    file_id: str
    tenant_id: str
    purpose: Purpose
    filename: str
    num_bytes: int
    life_s: int = DEFAULT_LIFE_S


def mint_file_id(now_s: float, random_bits: int) -> str:
    """The id of a new file, and the key of its bytes, from 98 random bits."""
    assert 0 <= random_bits < 2**NUM_RANDOM_BITS
    return "file-" + mint_request_id(now_s, random_bits)


_SELECT = """
    SELECT file_id, tenant_id, purpose, filename, num_bytes, created_at, expires_at FROM files
    WHERE tenant_id = :tenant_id AND deleted_at IS NULL AND expires_at > now()
"""


async def insert_file(connection: AsyncConnection, file: NewFile) -> StoredFile:
    """Make a stored file visible to its tenant."""
    result = await connection.execute(
        text(
            """
            INSERT INTO files (file_id, tenant_id, purpose, filename, num_bytes, expires_at)
            VALUES (:file_id, :tenant_id, :purpose, :filename, :num_bytes,
                    now() + make_interval(secs => :life_s))
            RETURNING file_id, tenant_id, purpose, filename, num_bytes, created_at, expires_at
            """
        ),
        {
            "file_id": file.file_id,
            "tenant_id": file.tenant_id,
            "purpose": file.purpose,
            "filename": file.filename,
            "num_bytes": file.num_bytes,
            "life_s": file.life_s,
        },
    )
    return _file(result.one())


async def find_file(connection: AsyncConnection, tenant_id: str, file_id: str) -> StoredFile:
    """The tenant's file. Raises NotFound for one that is not there, or not theirs."""
    _check_id(file_id)
    result = await connection.execute(
        text(f"{_SELECT} AND file_id = :file_id"),
        {"file_id": file_id, "tenant_id": tenant_id},
    )
    row = result.one_or_none()
    if row is None:
        raise no_such_file(file_id)
    return _file(row)


def no_such_file(file_id: str, param: str = "file_id") -> NotFound:
    """What is said of every file id that the tenant may not see."""
    return NotFound(f"There is no file {file_id[:MAX_SHOWN_ID]!a}.", param=param)


def is_file_id(text: str) -> bool:
    """True if the text could be an id of ours; PostgreSQL would not even take some others."""
    return _FILE_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FilePage:
    """Which of a tenant's files to list: `limit` of them after the file `after`."""

    limit: int
    order: Order = "desc"
    after: str | None = None
    purpose: str | None = None


async def list_files(
    connection: AsyncConnection, tenant_id: str, page: FilePage
) -> tuple[list[StoredFile], bool]:
    """One page by (created_at, id), and whether there are more. Raises InvalidRequest.

    A deleted file still serves as a cursor, so that a page never breaks.
    """
    values: dict[str, str | int | datetime | None] = {
        "tenant_id": tenant_id,
        "purpose": page.purpose,
        "limit": page.limit + 1,
    }
    beyond = ""
    if page.after is not None:
        values["cursor_at"] = await _created_at(connection, tenant_id, page.after)
        values["cursor_id"] = page.after
        comparison = "<" if page.order == "desc" else ">"
        beyond = f"AND (created_at, file_id) {comparison} (:cursor_at, :cursor_id)"
    rows = await connection.execute(
        text(
            f"""
            {_SELECT} AND (CAST(:purpose AS text) IS NULL OR purpose = :purpose) {beyond}
            ORDER BY created_at {page.order}, file_id {page.order} LIMIT :limit
            """
        ),
        values,
    )
    files = [_file(row) for row in rows]
    return files[: page.limit], len(files) > page.limit


async def delete_file(connection: AsyncConnection, tenant_id: str, file_id: str) -> None:
    """Take the file from its tenant's sight. Raises NotFound, or Conflict while a batch reads it.

    The bytes are the caller's to delete, after the commit.
    """
    _check_id(file_id)
    # The row lock keeps a batch on this file from being created meanwhile.
    result = await connection.execute(
        text(f"{_SELECT} AND file_id = :file_id FOR UPDATE"),
        {"file_id": file_id, "tenant_id": tenant_id},
    )
    if result.one_or_none() is None:
        raise no_such_file(file_id)
    reading = await connection.scalar(
        text(
            """
            SELECT batch_id FROM batches
            WHERE input_file_id = :file_id AND tenant_id = :tenant_id
              AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling') LIMIT 1
            """
        ),
        {"file_id": file_id, "tenant_id": tenant_id},
    )
    if reading is not None:
        raise Conflict(f"The batch {reading} still reads {file_id}; cancel it, or wait for it.")
    await connection.execute(
        text("UPDATE files SET deleted_at = now() WHERE file_id = :file_id"), {"file_id": file_id}
    )


def _check_id(file_id: str) -> None:
    if not is_file_id(file_id):
        raise no_such_file(file_id)


async def _created_at(connection: AsyncConnection, tenant_id: str, after: str) -> datetime:
    created_at = None
    if is_file_id(after):
        created_at = await connection.scalar(
            text("SELECT created_at FROM files WHERE file_id = :after AND tenant_id = :tenant_id"),
            {"after": after, "tenant_id": tenant_id},
        )
    if created_at is None:
        raise InvalidRequest(
            f"There is no file {after[:MAX_SHOWN_ID]!a} to go on after.", param="after"
        )
    assert isinstance(created_at, datetime)
    return created_at


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(*tuple(row))
