"""The headers with which a caller says that a connection may break.

X-Resume-Grace    seconds for which the request lives on after its last reader left, 0 to 60
Last-Event-ID     the id of the last event that arrived, in a request that goes on after it
"""

from fastapi import Request

from api.authentication import Caller
from engine.interface.errors import InvalidRequest

RESUME_GRACE = "x-resume-grace"
LAST_EVENT_ID = "last-event-id"
MAX_GRACE_S = 60
MAX_DIGITS = 9


def resume_grace_s(request: Request, caller: Caller, default_s: int = 0) -> int:
    """The grace asked for, else the longer of the key's and the default. Raises InvalidRequest."""
    value = request.headers.get(RESUME_GRACE)
    if value is None:
        return max(caller.resume_grace_s, default_s)
    grace_s = whole_number(value)
    if grace_s is None or grace_s > MAX_GRACE_S:
        raise InvalidRequest(
            f"{RESUME_GRACE} must be a whole number of seconds from 0 to {MAX_GRACE_S}.",
            param=RESUME_GRACE,
        )
    return grace_s


def last_event(request: Request, completion_id: str) -> int | None:
    """How many tokens of the completion the caller has, by its header. Raises InvalidRequest."""
    value = request.headers.get(LAST_EVENT_ID)
    if value is None:
        return None
    named, _, number = value.rpartition(":")
    num_tokens = whole_number(number)
    if named != completion_id or num_tokens is None:
        raise InvalidRequest(
            f"{LAST_EVENT_ID} must be the id of an event of this stream, {completion_id}:<n>.",
            param=LAST_EVENT_ID,
        )
    return num_tokens


def whole_number(value: str) -> int | None:
    """The number that a header or a query spells; None if it spells none."""
    is_number = value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS
    return int(value) if is_number else None
