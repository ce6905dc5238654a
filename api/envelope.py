"""What every response has around it: an id, the time it took, and an answer even to a bug.

Pure ASGI. The id is ours: it is minted here, names the request everywhere, and a caller's own
X-Request-Id is never used for anything but being said back.
"""

import logging
import re
import time
from collections.abc import Callable

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from control.protocol.error_object import INTERNAL

REQUEST_ID_PREFIX = "req_"

BEGAN_AT = "began_at"
_STATE = "request_id"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_log = logging.getLogger("headrace.gateway")


def request_id_of(request: Request) -> str:
    """The id minted for this request, without a prefix."""
    request_id = request.scope["state"][_STATE]
    assert isinstance(request_id, str)
    return request_id


def began_at(scope: Scope) -> float:
    """The monotonic second at which the request's first byte was read."""
    at = scope["state"].get(BEGAN_AT)
    return at if isinstance(at, float) else time.monotonic()


class Envelope:
    """Middleware around the whole app."""

    def __init__(self, app: ASGIApp, mint_id: Callable[[], str]) -> None:
        self._app = app
        self._mint_id = mint_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = self._mint_id()
        scope.setdefault("state", {})[_STATE] = request_id
        is_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                took_ms = int((time.monotonic() - started) * 1000)
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", (REQUEST_ID_PREFIX + request_id).encode()),
                    (b"openai-processing-ms", b"%d" % took_ms),
                    *_echoed(scope),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            return
        except Exception:
            _log.exception("request %s failed", REQUEST_ID_PREFIX + request_id)
            if is_started:
                raise
            await error_response(INTERNAL)(scope, receive, send_with_headers)


def _echoed(scope: Scope) -> list[tuple[bytes, bytes]]:
    ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
    is_safe = len(ids) == 1 and _SAFE_ID.fullmatch(ids[0])
    return [(b"x-client-request-id", ids[0])] if is_safe else []
