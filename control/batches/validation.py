"""Reads a batch's input file line by line and says what is wrong with it, and where.

Memory is bounded by one line and a digest per custom_id, however large the file. What concerns
the file as a whole (a line that is no request, two equal ids, a second model) fails the batch
before anything runs; what concerns one request's body is that line's own error, later.
"""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from control.protocol.json_body import parse_object
from control.registry.model_version import Registry
from engine.interface.errors import InvalidRequest

MAX_LINES = 50_000
MAX_FAULTS = 100
MAX_LINE_BYTES = 4 * 2**20
MAX_CUSTOM_ID_CHARS = 512

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of the file. `number` counts from 1; `body` is its JSON as it was sent."""

    number: int
    custom_id: str
    body: bytes
    model: str


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why the file is refused. `line` is None for what concerns no single line."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def as_object(self) -> dict[str, str | int | None]:
        """The fault as the batch object lists it."""
        return {
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "line": self.line,
        }


class BrokenLine(Exception):
    """A line that is no request for this batch."""

    def __init__(self, fault: LineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check of a whole file found: faults, or the pinned model that all lines name."""

    faults: tuple[LineFault, ...]
    model: str | None


async def check_input(chunks: AsyncIterable[bytes], endpoint: str, registry: Registry) -> Verdict:
    """Check every line, up to a hundred faults or fifty thousand lines."""
    check = InputCheck(endpoint, registry)
    async for number, line in split_lines(chunks):
        if not check.take(number, line):
            break
    return check.verdict()


async def read_lines(chunks: AsyncIterable[bytes], endpoint: str) -> AsyncIterator[InputLine]:
    """The requests of a file that was checked before."""
    async for number, line in split_lines(chunks):
        if line.strip():
            yield parse_line(number, line, endpoint)


class InputCheck:
    """The state of one check: what was seen so far, and what was wrong with it."""

    def __init__(self, endpoint: str, registry: Registry) -> None:
        self._endpoint = endpoint
        self._registry = registry
        self._faults: list[LineFault] = []
        self._num_lines = 0
        self._seen: set[bytes] = set()
        self._model: str | None = None

    def take(self, number: int, line: bytes) -> bool:
        """Check one line. False once there is no point in going on."""
        if not line.strip():
            return True
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            message = f"The file has more than {MAX_LINES} requests; split it."
            self._faults.append(LineFault("too_many_requests", message))
            return False
        try:
            self._check(parse_line(number, line, self._endpoint))
        except BrokenLine as broken:
            self._faults.append(broken.fault)
        return len(self._faults) < MAX_FAULTS

    def verdict(self) -> Verdict:
        """What was found, once no line is left."""
        if not self._num_lines:
            fault = LineFault("empty_file", "The input file holds no requests.")
            return Verdict((fault,), None)
        version = self._registry.resolve(self._model or "")
        if self._faults or version is None:
            return Verdict(tuple(self._faults[:MAX_FAULTS]), None)
        return Verdict((), version.pinned_name)

    def _check(self, line: InputLine) -> None:
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise _broken(
                line.number,
                "duplicate_custom_id",
                "This custom_id was used by an earlier line; each must be unique.",
                "custom_id",
            )
        self._seen.add(digest)
        if self._registry.resolve(line.model) is None:
            raise _broken(
                line.number, "model_not_found", "No model of that name is served.", "body.model"
            )
        if self._model is None:
            self._model = line.model
        elif line.model != self._model:
            raise _broken(
                line.number,
                "mixed_models",
                "All requests of a batch must name the same model.",
                "body.model",
            )


def parse_line(number: int, line: bytes, endpoint: str) -> InputLine:
    """The request that a line states. Raises BrokenLine; messages never repeat the line."""
    if len(line) > MAX_LINE_BYTES:
        message = f"The line is over {MAX_LINE_BYTES} bytes."
        raise _broken(number, "request_too_large", message, None)
    try:
        fields = parse_object(line)
    except InvalidRequest as error:
        raise _broken(number, "invalid_json_line", str(error), None) from error
    for name in ("custom_id", "method", "url", "body"):
        if fields.get(name) is None:
            message = f"{name} is required."
            raise _broken(number, "missing_required_parameter", message, name)
    custom_id = fields["custom_id"]
    if not isinstance(custom_id, str) or not is_usable_custom_id(custom_id):
        message = (
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters without NUL."
        )
        raise _broken(number, "invalid_value", message, "custom_id")
    if fields["method"] != "POST":
        raise _broken(number, "invalid_method", "method must be POST.", "method")
    if fields["url"] != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}."
        raise _broken(number, "url_mismatch", message, "url")
    body = fields["body"]
    if not isinstance(body, dict):
        raise _broken(number, "invalid_value", "body must be a JSON object.", "body")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        message = "body.model is required."
        raise _broken(number, "missing_required_parameter", message, "body.model")
    return InputLine(number, custom_id, bytes(_raw_fields.decode(line)["body"]), model)


def is_usable_custom_id(custom_id: str) -> bool:
    """True for text that can be kept exactly and written back exactly."""
    return 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS and "\0" not in custom_id


async def split_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Lines by `\\n` with their numbers from 1; a `\\r` before it is JSON white space.

    A line that is too long is yielded cut, one byte over the limit, and the rest is skipped.
    """
    number, parts, size = 1, list[bytes](), 0
    async for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            parts.append(piece[: MAX_LINE_BYTES + 1 - size])
            yield number, b"".join(parts)
            number, parts, size = number + 1, [], 0
        parts.append(rest[: MAX_LINE_BYTES + 1 - size])
        size += len(parts[-1])
    if size:
        yield number, b"".join(parts)


def _broken(number: int, code: str, message: str, param: str | None) -> BrokenLine:
    return BrokenLine(LineFault(code, message, param, number))
