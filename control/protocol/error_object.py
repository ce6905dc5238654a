"""The error object: the same words in an HTTP body, in a stream's frame and in a batch's line.

One table says with which status and type each class of error is told. A class that is not listed
is told as its nearest listed ancestor; anything else is our own fault and says nothing of itself.
"""

from dataclasses import dataclass

from control.errors import (
    ENDINGS,
    AuthenticationFailed,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    KeyMoved,
    KeyReused,
    ModelNotFound,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    ReplicaLost,
    RequestInProgress,
    RequestLost,
    RequestTooLarge,
    ReservationTooLarge,
    Restarting,
    ServiceError,
    StoreUnavailable,
    StreamExpired,
    TooManyFailures,
)
from control.streams.follower import FollowerLag
from engine.interface.errors import InvalidRequest
from engine.interface.generation_delta import Usage

CALLER = "invalid_request_error"
CAPACITY = "service_unavailable_error"

FACES: dict[type[Exception], tuple[int, str]] = {
    InvalidRequest: (400, CALLER),
    AuthenticationFailed: (401, "authentication_error"),
    PermissionDenied: (403, "permission_error"),
    ModelNotFound: (404, CALLER),
    NotFound: (404, CALLER),
    Conflict: (409, CALLER),
    Cancelled: (409, CALLER),
    RequestInProgress: (409, "idempotency_error"),
    KeyMoved: (409, "idempotency_error"),
    StreamExpired: (410, CALLER),
    RequestTooLarge: (413, CALLER),
    QuotaExceeded: (429, "rate_limit_error"),
    ReservationTooLarge: (429, "rate_limit_error"),
    KeyReused: (422, "idempotency_error"),
    TooManyFailures: (429, "rate_limit_error"),
    GenerationFailed: (500, "server_error"),
    ServiceError: (500, "server_error"),
    Overloaded: (503, CAPACITY),
    StoreUnavailable: (503, CAPACITY),
    Restarting: (503, CAPACITY),
    ReplicaLost: (503, CAPACITY),
    RequestLost: (503, CAPACITY),
    FollowerLag: (503, CAPACITY),
    DeadlineExceeded: (504, "timeout_error"),
}


@dataclass(frozen=True, slots=True)
class ErrorFace:
    """An error as callers see it; `param` and `code` are null where there is nothing to say."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    usage: Usage | None = None

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object of the wire."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


INTERNAL = ErrorFace(500, "server_error", "internal_error", "The service failed. It was noted.")


def face_of(error: Exception) -> ErrorFace:
    """How the error is told."""
    for ancestor in type(error).__mro__:
        if ancestor in FACES:
            status, kind = FACES[ancestor]
            break
    else:
        return INTERNAL
    if isinstance(error, InvalidRequest):
        return ErrorFace(status, kind, error.code, str(error), error.param or None)
    assert isinstance(error, ServiceError)
    message, wait_ms = str(error), error.retry_after_ms
    return ErrorFace(status, kind, error.code, message, error.param, wait_ms, error.usage)


def ending_of(code: str, usage: Usage | None = None) -> ServiceError:
    """The error for the code with which an accepted request ended without finishing."""
    ending = ENDINGS.get(code, GenerationFailed)
    error = ending(ending.__doc__ or ending.code)
    error.usage = usage
    return error
