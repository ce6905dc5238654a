"""How a call says that it may be, or is, the repetition of another.

Idempotency-Key            1 to 255 printable ASCII characters; kept for a day
Prefer: respond-async      do not wait for a request of that key that is under way
x-stainless-retry-count    SDKs: 0 for a call, 1 and more for its repetitions under no key
x-stainless-read-timeout   SDKs: seconds that they wait for an answer
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from api.resume_headers import whole_number
from control.admission.idempotency import KeyClaim
from control.protocol.canonical_body import body_hash
from engine.interface.errors import InvalidRequest

IDEMPOTENCY_KEY = "idempotency-key"
RETRY_COUNT = "x-stainless-retry-count"
READ_TIMEOUT = "x-stainless-read-timeout"
MAX_KEY_LENGTH = 255
DEFAULT_READ_TIMEOUT_S = 600
MAX_READ_TIMEOUT_S = 3600
SLACK_S = 60
REPLAYED = {"idempotent-replayed": "true"}


@dataclass(frozen=True, slots=True)
class Repetition:
    """What a call says of repetitions.

    `retry_count` is None for a client that is not known to repeat what breaks. What broke longer
    than `within_s` ago is not repeated any more. `body_hash` is empty where nobody needs it.
    """

    key: str | None
    body_hash: bytes
    retry_count: int | None = None
    within_s: float = DEFAULT_READ_TIMEOUT_S + SLACK_S
    prefers_async: bool = False

    @property
    def may_repeat(self) -> bool:
        """Whether what this call asks for may have been made before."""
        return self.key is not None or bool(self.retry_count)

    def claim(self, tenant_id: str, endpoint: str, replaces: str | None = None) -> KeyClaim | None:
        """The call's claim to its key, if it has one."""
        if self.key is None:
            return None
        return KeyClaim(tenant_id, endpoint, self.key, self.body_hash, replaces)


def repetition_of(request: Request, fields: Mapping[str, object]) -> Repetition:
    """What the call with this body says. Raises InvalidRequest."""
    headers = request.headers
    timeout_s = whole_number(headers.get(READ_TIMEOUT, "").partition(".")[0])
    waits_s = DEFAULT_READ_TIMEOUT_S if timeout_s is None else min(timeout_s, MAX_READ_TIMEOUT_S)
    key, retry_count = idempotency_key(request), whole_number(headers.get(RETRY_COUNT, ""))
    is_repeatable = key is not None or retry_count is not None
    return Repetition(
        key=key,
        body_hash=body_hash(fields) if is_repeatable else b"",
        retry_count=retry_count,
        within_s=waits_s + SLACK_S,
        prefers_async="respond-async" in headers.get("prefer", "").lower(),
    )


def idempotency_key(request: Request) -> str | None:
    """The call's key. Raises InvalidRequest."""
    keys = request.headers.getlist(IDEMPOTENCY_KEY)
    if not keys:
        return None
    key = keys[0]
    is_printable = key.isascii() and key.isprintable()
    if len(keys) > 1 or not is_printable or not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} must be 1 to {MAX_KEY_LENGTH} printable ASCII characters.",
            param=IDEMPOTENCY_KEY,
        )
    return key


def endpoint_of(request: Request) -> str:
    """To which a key belongs: method and path."""
    return f"{request.method} {request.scope['path']}"


def claim_of(request: Request, tenant_id: str, hashed: bytes) -> KeyClaim | None:
    """The claim of a call to its key, None if it has none. Raises InvalidRequest."""
    key = idempotency_key(request)
    return None if key is None else KeyClaim(tenant_id, endpoint_of(request), key, hashed)


def answer_once(body: bytes, *, is_replayed: bool) -> Response:
    """The JSON that a call was answered, now or before."""
    headers = REPLAYED if is_replayed else None
    return Response(body, headers=headers, media_type="application/json")
