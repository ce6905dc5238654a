"""Strict JSON from bytes: one reader for the gateway and for batch lines.

Only UTF-8 without a byte order mark, only what RFC 8259 calls JSON (no NaN, no comments, nothing
after the value), only numbers that a double or a 4,300-digit integer can hold, only nesting that
fits the stack. Of equal keys in one object the last wins, here and therefore everywhere.
"""

import msgspec

from engine.interface.errors import InvalidRequest

NO_PARAM = ""
"""The `param` of an error that concerns the body as a whole; it is null on the wire."""

_decoder = msgspec.json.Decoder(dict[str, object])


def parse_object(body: bytes) -> dict[str, object]:
    """The body's object. Raises InvalidRequest; the message never repeats the body."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        if not body.lstrip(b" \t\r\n").startswith(b"{"):
            raise _malformed("The body must be a JSON object.", "invalid_json") from error
        raise _malformed("A number in the body is out of range.", "invalid_value") from error
    except msgspec.DecodeError as error:
        raise _malformed(f"The body is not valid JSON. {error}.", "invalid_json") from error
    except RecursionError as error:
        raise _malformed("The body is nested too deeply.", "invalid_json") from error


def _malformed(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, param=NO_PARAM, code=code)
