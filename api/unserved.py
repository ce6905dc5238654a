"""Headers that are known and not served: being ignored would be worse than being refused."""

from fastapi import Request

from control.protocol.strict_model import UNSUPPORTED
from engine.interface.errors import InvalidRequest

IDEMPOTENCY_KEY = "idempotency-key"


def refuse_idempotency_key(request: Request) -> None:
    """Raise InvalidRequest for a caller who relies on the header to repeat safely."""
    if IDEMPOTENCY_KEY in request.headers:
        raise InvalidRequest(
            f"The header {IDEMPOTENCY_KEY} is not served yet; send the request without it.",
            param=IDEMPOTENCY_KEY,
            code=UNSUPPORTED,
        )
