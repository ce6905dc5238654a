"""Every refusal and failure as an HTTP response of one shape.

Which status and type an error has is the table in `control.protocol.error_object`; here are the
headers. Nothing in a response comes from an exception that is not meant for callers.
"""

import math
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.gateway import gateway_of
from control.errors import Conflict, DeadlineExceeded, ReservationTooLarge, ServiceError
from control.protocol.error_object import CALLER, ErrorFace, face_of
from control.protocol.responses import to_json, usage_object
from engine.interface.errors import InvalidRequest

DEFAULT_RETRY_AFTER_MS = 1000
LONGEST_RETRY_AFTER_MS = 60_000

_ROUTER_FACES = {
    404: ("not_found", "There is nothing at this path."),
    405: ("method_not_allowed", "This path does not take this method."),
    415: ("unsupported_media_type", "Send application/json, UTF-8, without Content-Encoding."),
}


def install_error_handlers(app: FastAPI) -> None:
    """Make the app answer every expected error in our shape."""
    app.add_exception_handler(ServiceError, _tell)
    app.add_exception_handler(InvalidRequest, _tell)
    app.add_exception_handler(HTTPException, _tell_router_error)
    app.add_exception_handler(RequestValidationError, _tell_bad_parameter)


def error_response(face: ErrorFace, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells the error."""
    return Response(
        to_json({**face.body, **_usage_of(face)}),
        face.status,
        headers={**_retry_headers(face), **(headers or {})},
        media_type="application/json",
    )


def _usage_of(face: ErrorFace) -> dict[str, object]:
    """What a request used that ended so."""
    return {} if face.usage is None else {"x_usage": usage_object(face.usage)}


def _retry_headers(face: ErrorFace) -> dict[str, str]:
    wait_ms = face.retry_after_ms
    if wait_ms is None and face.status == 503:
        wait_ms = DEFAULT_RETRY_AFTER_MS
    if wait_ms is None:
        return {}
    headers = {"retry-after-ms": str(wait_ms), "retry-after": str(math.ceil(wait_ms / 1000))}
    if wait_ms > LONGEST_RETRY_AFTER_MS:
        headers["x-should-retry"] = "false"
    return headers


def told(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells the error, and these headers."""
    # SDKs repeat every 409, 429 and 504 by themselves; these would only end the same way.
    is_final = isinstance(error, Conflict | DeadlineExceeded | ReservationTooLarge)
    final = {"x-should-retry": "false"} if is_final else {}
    return error_response(face_of(error), {**final, **(headers or {})})


async def _tell(_: Request, error: Exception) -> Response:
    return told(error)


async def _tell_router_error(request: Request, error: Exception) -> Response:
    """Errors of routing. Strangers learn only that they need a key, not which paths exist."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        try:
            await gateway_of(request).authenticator.authenticate(request.scope)
        except ServiceError as refusal:
            return await _tell(request, refusal)
    code, message = _ROUTER_FACES.get(error.status_code, ("invalid_request", "Bad request."))
    return error_response(ErrorFace(error.status_code, CALLER, code, message), error.headers)


async def _tell_bad_parameter(_: Request, error: Exception) -> Response:
    """A query or form parameter that FastAPI found wrong."""
    assert isinstance(error, RequestValidationError)
    detail = error.errors()[0]
    param = ".".join(str(step) for step in detail["loc"][1:])[:64]
    is_missing = detail["type"] == "missing"
    code = "missing_required_parameter" if is_missing else "invalid_value"
    return error_response(ErrorFace(400, CALLER, code, f"{param}: {detail['msg']}", param))
