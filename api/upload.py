"""Reads a multipart upload as it comes: one file, a few short fields, in whatever order.

Nothing is collected but the fields: the file's bytes are handed on as they arrive, so memory
stays the same however large the file is.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from control.errors import RequestTooLarge
from engine.interface.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 8
MAX_FIELD_BYTES = 1024
MAX_FILENAME_BYTES = 1024
MAX_FRAME_BYTES = 64 * 1024  # boundaries, part headers and fields around the file


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_name: bytes = b""
    header_value: bytes = b""
    name: str = ""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)


class Upload:
    """One upload. Exhaust `file_chunks`, then `filename` and `fields` are known.

    Raises InvalidRequest for a form that is broken or holds other than it should, and
    RequestTooLarge once the file is over `max_bytes`.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._request = request
        self._max_bytes = max_bytes
        self._num_file_bytes = 0
        self._part = _Part()
        self._pieces: list[bytes] = []
        self._is_whole = False

    async def file_chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes; drives the parser to the end of the body."""
        parser = MultipartParser(self._boundary(), self._callbacks())
        num_bytes = 0
        try:
            async for chunk in self._request.stream():
                num_bytes += len(chunk)
                if num_bytes > self._max_bytes + MAX_FRAME_BYTES:
                    raise self._too_large()
                parser.write(chunk)
                if self._pieces:
                    yield b"".join(self._pieces)
                    self._pieces.clear()
            parser.finalize()
        except FormParserError as error:
            raise _broken("The multipart body is malformed.") from error
        if not self._is_whole:
            raise _broken("The multipart body ends before its last boundary.")

    def _boundary(self) -> bytes:
        _, options = parse_options_header(self._request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= 256:
            raise _broken("The Content-Type names no usable multipart boundary.")
        return boundary

    def _callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._part = _Part()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _end_header(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        part.header_name = part.header_value = b""

    def _end_headers(self) -> None:
        part = self._part
        _, options = parse_options_header(part.headers.get(b"content-disposition"))
        part.name = _text(options.get(b"name", b""), "name")
        part.is_file = b"filename" in options
        if not part.is_file:
            return
        if part.name != "file" or self.filename is not None:
            raise _broken("Send exactly one file, in the part named file.")
        filename = options[b"filename"]
        if len(filename) > MAX_FILENAME_BYTES:
            raise _broken(f"The filename is over {MAX_FILENAME_BYTES} bytes.")
        self.filename = _text(filename, "filename")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._num_file_bytes += end - start
            if self._num_file_bytes > self._max_bytes:
                raise self._too_large()
            self._pieces.append(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            raise _broken(f"A field is over {MAX_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        part = self._part
        if part.is_file:
            return
        if part.name in self.fields or len(self.fields) >= MAX_FIELDS:
            raise _broken("A field was sent twice, or there are too many.")
        self.fields[part.name] = _text(bytes(part.value), part.name)

    def _end(self) -> None:
        self._is_whole = True

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"The file is larger than the limit of {self._max_bytes} bytes.")


def _text(data: bytes, param: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _broken("Names and fields must be UTF-8.") from error
    if "\0" in text:
        raise InvalidRequest(f"{param} must not hold the NUL character.", param=param)
    return text


def _broken(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="file")
