"""The Files API: upload, look, read, list, delete. A tenant sees its own files and no others.

Bytes are stored before the row says they exist, under a key that we mint; when the upload turns
out wrong they are deleted again. What the caller calls the file is kept as text and shown back.
"""

import re
import secrets
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from api.body import check_declared_length, check_media_type
from api.callers import BatchCaller
from api.gateway import Gateway, gateway_of
from api.repetition import answer_once, claim_of, idempotency_key
from api.stored import transaction
from api.upload import MAX_FRAME_BYTES, Upload
from control.admission.idempotency import answered_once
from control.files.files import (
    DEFAULT_LIFE_S,
    MAX_FILE_BYTES,
    MAX_LIFE_S,
    MIN_LIFE_S,
    FilePage,
    NewFile,
    delete_file,
    find_file,
    insert_file,
    list_files,
    mint_file_id,
    no_such_file,
)
from control.files.store import ObjectNotFound
from control.identity.request_id import NUM_RANDOM_BITS
from control.protocol.canonical_body import body_hash
from control.protocol.responses import to_json
from control.protocol.strict_model import UNSUPPORTED
from engine.interface.errors import InvalidRequest

FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})

_ONE_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")

router = APIRouter()


@router.post("/v1/files")
async def upload_file(request: Request, caller: BatchCaller) -> Response:
    """Store a file for a batch to read."""
    gateway = gateway_of(request)
    idempotency_key(request)  # A bad one is refused before a byte is read.
    check_media_type(request, "multipart/form-data")
    check_declared_length(request, MAX_FILE_BYTES + MAX_FRAME_BYTES)
    file_id = mint_file_id(gateway.clock.now(), secrets.randbits(NUM_RANDOM_BITS))
    upload = Upload(request, MAX_FILE_BYTES)
    digest = sha256()
    num_bytes = await gateway.files.write(file_id, _hashed(upload.file_chunks(), digest.update))
    is_kept = False
    try:
        file = _new_file(upload, file_id, caller.tenant_id, num_bytes)
        fields = {**upload.fields, "filename": file.filename, "sha256": digest.hexdigest()}
        claim = claim_of(request, caller.tenant_id, body_hash(fields))
        async with transaction(gateway.database) as connection:

            async def act() -> bytes:
                return to_json((await insert_file(connection, file)).as_object())

            answer, is_replayed = await answered_once(connection, claim, file_id, act)
        is_kept = not is_replayed
    finally:
        if not is_kept:
            await gateway.files.delete(file_id)
    return answer_once(answer, is_replayed=is_replayed)


@router.get("/v1/files")
async def list_all_files(
    request: Request,
    caller: BatchCaller,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    purpose: Literal["batch", "batch_output"] | None = None,
) -> Response:
    """One page of the tenant's files."""
    page = FilePage(limit, order, after, purpose)
    async with transaction(gateway_of(request).database) as connection:
        files, has_more = await list_files(connection, caller.tenant_id, page)
    return _json(
        {
            "object": "list",
            "data": [file.as_object() for file in files],
            "first_id": files[0].file_id if files else None,
            "last_id": files[-1].file_id if files else None,
            "has_more": has_more,
        }
    )


@router.get("/v1/files/{file_id}")
async def show_file(request: Request, file_id: str, caller: BatchCaller) -> Response:
    """What is known of a file."""
    async with transaction(gateway_of(request).database) as connection:
        file = await find_file(connection, caller.tenant_id, file_id)
    return _json(file.as_object())


@router.get("/v1/files/{file_id}/content")
async def read_file(request: Request, file_id: str, caller: BatchCaller) -> Response:
    """A file's bytes, or one range of them."""
    gateway = gateway_of(request)
    async with transaction(gateway.database) as connection:
        file = await find_file(connection, caller.tenant_id, file_id)
    headers = {"accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    asked = parse_range(request.headers.get("range"), file.num_bytes)
    if asked is None:
        start, end, status = 0, file.num_bytes, 200
    elif asked[0] >= asked[1]:
        headers["content-range"] = f"bytes */{file.num_bytes}"
        return Response(b"", 416, headers=headers)
    else:
        (start, end), status = asked, 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{file.num_bytes}"
    headers["content-length"] = str(end - start)
    chunks = await _opened(gateway, file_id, start, end)
    return StreamingResponse(chunks, status, headers, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def remove_file(request: Request, file_id: str, caller: BatchCaller) -> Response:
    """Forget a file that no batch reads."""
    gateway = gateway_of(request)
    async with transaction(gateway.database) as connection:
        await delete_file(connection, caller.tenant_id, file_id)
    await gateway.files.delete(file_id)
    return _json({"id": file_id, "object": "file", "deleted": True})


def parse_range(header: str | None, num_bytes: int) -> tuple[int, int] | None:
    """[start, end) of the one range that is asked for; empty if it lies outside the file.

    None means the whole file: no range, several ranges, or something that is no range. A server
    may answer those so, and it costs nobody anything.
    """
    match = _ONE_RANGE.fullmatch(header.strip()) if header and len(header) < 64 else None
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, num_bytes - int(last)), num_bytes
    start = int(first)
    end = num_bytes if not last else min(int(last) + 1, num_bytes)
    return None if last and int(last) < start else (start, end)


async def _hashed(
    chunks: AsyncIterator[bytes], update: Callable[[bytes], None]
) -> AsyncIterator[bytes]:
    """The chunks, each shown to `update` on its way."""
    async for chunk in chunks:
        update(chunk)
        yield chunk


def _new_file(upload: Upload, file_id: str, tenant_id: str, num_bytes: int) -> NewFile:
    """What the form said. Raises InvalidRequest."""
    fields = upload.fields
    if upload.filename is None:
        raise InvalidRequest("file is required.", param="file", code="missing_required_parameter")
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest("This is not a field here.", param=name[:64], code=UNSUPPORTED)
    if "purpose" not in fields:
        raise InvalidRequest(
            "purpose is required.", param="purpose", code="missing_required_parameter"
        )
    if fields["purpose"] != "batch":
        raise InvalidRequest("purpose must be batch.", param="purpose")
    return NewFile(file_id, tenant_id, "batch", upload.filename, num_bytes, _life_s(fields))


def _life_s(fields: dict[str, str]) -> int:
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_LIFE_S
    if anchor != "created_at":
        raise InvalidRequest("The anchor must be created_at.", param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdecimal()
    life_s = int(seconds[:12]) if is_number and seconds is not None else 0
    if not MIN_LIFE_S <= life_s <= MAX_LIFE_S:
        raise InvalidRequest(
            f"The seconds must be a whole number from {MIN_LIFE_S} to {MAX_LIFE_S}.",
            param="expires_after[seconds]",
        )
    return life_s


async def _opened(gateway: Gateway, file_id: str, start: int, end: int) -> AsyncIterator[bytes]:
    """The file's chunks, known to be there before the response begins."""
    chunks = gateway.files.read(file_id, start, end)
    try:
        first = await anext(chunks, b"")
    except ObjectNotFound as error:
        raise no_such_file(file_id) from error

    async def all_chunks() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return all_chunks()


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
