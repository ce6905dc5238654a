"""How a route administers: the caller's authority, confirmed, and one transaction.

A key that is remembered may have been revoked since, which other routes tolerate for seconds. Here
it is looked up again in the transaction itself, and a change keeps it locked until its commit: when
a revocation is done, nothing that the key did can come after it.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Query, Request
from pydantic import AfterValidator
from sqlalchemy import Connection
from starlette.responses import Response

from api.authentication import Caller
from api.body import read_json_body
from api.envelope import REQUEST_ID_PREFIX, request_id_of
from api.gateway import gateway_of
from api.stored import transaction
from control.errors import AuthenticationFailed
from control.identity.administration import Administration
from control.identity.authority import Administrator, KeyReach
from control.identity.keys import is_usable
from control.identity.page import DEFAULT_LIMIT, MAX_LIMIT
from control.protocol.json_body import parse_object
from control.protocol.responses import to_json
from control.protocol.strict_model import UNSUPPORTED
from engine.interface.errors import InvalidRequest

MAX_BODY_BYTES = 64 * 1024
MAX_FILTER_LENGTH = 200
IDEMPOTENCY_KEY = "idempotency-key"

T = TypeVar("T")


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("it must not hold the NUL character")
    return value


Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
Filter = Annotated[str, Query(max_length=MAX_FILTER_LENGTH), AfterValidator(_without_nul)]

USUAL_LIMIT = DEFAULT_LIMIT


async def look(
    request: Request, caller: Caller, act: Callable[[Connection, Administration], T]
) -> T:
    """Do what changes nothing."""
    return await _administer(request, caller, act, is_change=False)


async def change(
    request: Request, caller: Caller, act: Callable[[Connection, Administration], T]
) -> T:
    """Do what changes something: all of it and its record, or nothing."""
    if IDEMPOTENCY_KEY in request.headers:
        raise InvalidRequest(
            f"The header {IDEMPOTENCY_KEY} is not served here; look whether it was done, instead.",
            param=IDEMPOTENCY_KEY,
            code=UNSUPPORTED,
        )
    return await _administer(request, caller, act, is_change=True)


async def read_fields(request: Request) -> dict[str, object]:
    """The object of a small JSON body. Raises InvalidRequest and RequestTooLarge."""
    return parse_object(await read_json_body(request, MAX_BODY_BYTES))


def answer(body: object) -> Response:
    """The body as JSON. It may hold a new key: nobody keeps it on the way."""
    headers = {"cache-control": "no-store"}
    return Response(to_json(body), media_type="application/json", headers=headers)


def page_object(data: list[dict[str, object]], ids: list[str], has_more: bool) -> object:
    """One page of a list, as OpenAI's lists look; `ids` are the cursors of its members."""
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


async def _administer(
    request: Request,
    caller: Caller,
    act: Callable[[Connection, Administration], T],
    *,
    is_change: bool,
) -> T:
    reach = KeyReach(caller.tenant_id, caller.is_operator, caller.scopes, caller.expires_at)
    request_id = REQUEST_ID_PREFIX + request_id_of(request)
    administrator = Administrator("key", caller.key_id, request_id, reach)

    def run(connection: Connection) -> T:
        if not is_usable(connection, caller.key_id, is_locked=is_change):
            raise AuthenticationFailed("The API key is unknown, has expired or was revoked.")
        return act(connection, Administration(connection, administrator))

    async with transaction(gateway_of(request).database) as connection:
        return await connection.run_sync(run)
