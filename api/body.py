"""Reading a request's body within limits, and not at all if it says itself that it breaks them."""

from email.message import Message as ContentTypeHeader

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from control.errors import RequestTooLarge


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises RequestTooLarge, or 415 for anything but plain UTF-8 JSON."""
    check_media_type(request, "application/json")
    check_declared_length(request, max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def check_media_type(request: Request, media_type: str) -> None:
    """Refuse compressed bodies (their real size is unknown) and other types with a 415."""
    if "content-encoding" in request.headers:
        raise HTTPException(415)
    header = ContentTypeHeader()
    header["content-type"] = request.headers.get("content-type", "")
    charset = header.get_content_charset("utf-8")
    if header.get_content_type() != media_type or charset not in ("utf-8", "utf8"):
        raise HTTPException(415)


def check_declared_length(request: Request, max_bytes: int) -> None:
    """Raise RequestTooLarge before a byte is read, if the declared length says so."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than the limit of {max_bytes} bytes.")
