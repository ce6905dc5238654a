"""Everything that can be told to a caller instead of an answer.

Each class is one sentence and one stable code. `control.protocol.error_object` gives each its
face on the wire, the same in a response, a stream's error frame and a batch's error line. A
caller's malformed value is `engine.interface.errors.InvalidRequest`: the engine refuses with it
too.
"""

from engine.interface.generation_delta import Usage


class ServiceError(Exception):
    """A refusal or a failure with a stable `code`.

    `retry_after_ms` is sent where waiting helps; None where it does not. `usage` is what the
    request came to that ended so, if it is known.
    """

    code = "internal_error"
    usage: Usage | None = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_ms = retry_after_ms


class AuthenticationFailed(ServiceError):
    """The request carries no key that we know."""

    code = "invalid_api_key"


class TooManyFailures(ServiceError):
    """One source offered too many unknown keys in a short time."""

    code = "rate_limit_exceeded"


class QuotaExceeded(ServiceError):
    """The tenant's limit for a minute, or for requests at once, is used up for now."""

    code = "rate_limit_exceeded"


class ReservationTooLarge(ServiceError):
    """The request may use more than its tenant's limit for a whole minute: waiting is no help."""

    code = "rate_limit_exceeded"


class PermissionDenied(ServiceError):
    """The key is known and may not do this."""

    code = "permission_denied"


class ModelNotFound(ServiceError):
    """No model of that name is served to this tenant."""

    code = "model_not_found"


class NotFound(ServiceError):
    """There is nothing of that id here for this tenant."""

    code = "not_found"


class StreamExpired(ServiceError):
    """What the request said is not kept any more."""

    code = "stream_expired"


class KeyReused(ServiceError):
    """The idempotency key was used before, with another body."""

    code = "idempotency_key_reused"


class RequestInProgress(ServiceError):
    """The request of that idempotency key is under way, and the caller does not want to wait."""

    code = "request_in_progress"


class KeyMoved(ServiceError):
    """What the idempotency key stands for has changed meanwhile; no caller is told of it."""

    code = "request_in_progress"


class Conflict(ServiceError):
    """The object is in a state that does not allow this."""

    code = "conflict"


class RequestTooLarge(ServiceError):
    """The body is larger than the limit."""

    code = "request_too_large"


class Overloaded(ServiceError):
    """Our capacity, not the caller's limit, is used up for now."""

    code = "server_is_overloaded"


class StoreUnavailable(ServiceError):
    """A database or the transport did not answer; nothing was accepted."""

    code = "server_is_overloaded"


class Restarting(ServiceError):
    """The process that held the stream is going away."""

    code = "server_restarting"


class ReplicaLost(ServiceError):
    """The replica died and the request could not be continued elsewhere."""

    code = "replica_lost"


class RequestLost(ServiceError):
    """The transport lost the request before it ended."""

    code = "request_lost"


class DeadlineExceeded(ServiceError):
    """The request's hard deadline passed."""

    code = "deadline_exceeded"


class Cancelled(ServiceError):
    """The caller, or somebody for the caller, cancelled the request."""

    code = "cancelled"


class GenerationFailed(ServiceError):
    """The engine could not compute this request; the fault is ours."""

    code = "internal_error"


ENDINGS: dict[str, type[ServiceError]] = {
    error.code: error
    for error in (
        Cancelled,
        DeadlineExceeded,
        GenerationFailed,
        Overloaded,
        ReplicaLost,
        RequestLost,
        Restarting,
    )
}
"""The error codes with which an accepted request can end, by the class that says so."""
