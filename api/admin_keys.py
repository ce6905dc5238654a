"""Keys over HTTP. A key itself is in the answer that made it, and nowhere else."""

from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import Response

from api.admin_bodies import KeyChange, NewKey, Rotation
from api.administrators import (
    USUAL_LIMIT,
    Filter,
    Limit,
    answer,
    change,
    look,
    page_object,
    read_fields,
)
from api.callers import AdminCaller
from api.gateway import gateway_of
from control.identity.administration import Administration
from control.identity.keys import ApiKey, KeyWish
from control.identity.page import Page

router = APIRouter()


@router.post("/admin/keys")
async def create_key(request: Request, caller: AdminCaller) -> Response:
    """Mint a key that is no wider than the asking one; `key` is shown this once."""
    body = NewKey.parse(await read_fields(request))
    pepper = gateway_of(request).pepper

    def act(_: Connection, acts: Administration) -> tuple[ApiKey, str]:
        expires_at = acts.moment_in(body.expires_in_s)
        wish = KeyWish(frozenset(body.scopes), body.name, expires_at, body.resume_grace_s)
        return acts.mint_key(pepper, body.tenant_id or caller.tenant_id, wish)

    key, secret = await change(request, caller, act)
    return answer({**key.as_object(), "key": secret})


@router.get("/admin/keys")
async def list_keys(
    request: Request,
    caller: AdminCaller,
    limit: Limit = USUAL_LIMIT,
    after: str | None = None,
    tenant_id: Filter | None = None,
) -> Response:
    """One page of the keys in reach, oldest first; revoked and expired ones are among them."""

    def act(_: Connection, acts: Administration) -> tuple[list[ApiKey], bool]:
        return acts.keys(tenant_id, Page(limit, after))

    keys, has_more = await look(request, caller, act)
    ids = [key.key_id for key in keys]
    return answer(page_object([key.as_object() for key in keys], ids, has_more))


@router.get("/admin/keys/{key_id}")
async def show_key(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """What is known of a key."""
    key = await look(request, caller, lambda _, acts: acts.key(key_id))
    return answer(key.as_object())


@router.post("/admin/keys/{key_id}")
async def change_key(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Give a key another name or resume grace."""
    body = KeyChange.parse(await read_fields(request))
    key = await change(
        request,
        caller,
        lambda _, acts: acts.change_key(key_id, body.name, body.resume_grace_s),
    )
    return answer(key.as_object())


@router.post("/admin/keys/{key_id}/rotate")
async def rotate_key(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Mint a key that can do the same, and end the old one (`replaces`) after the grace."""
    body = Rotation.parse(await read_fields(request))
    pepper = gateway_of(request).pepper

    def act(_: Connection, acts: Administration) -> tuple[ApiKey, ApiKey, str]:
        return acts.rotate_key(pepper, key_id, body.grace_s, acts.moment_in(body.expires_in_s))

    old, new, secret = await change(request, caller, act)
    return answer({**new.as_object(), "key": secret, "replaces": old.as_object()})


@router.post("/admin/keys/{key_id}/revoke")
async def revoke_key(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Refuse a key for ever; every gateway does within 5 seconds."""
    key = await change(request, caller, lambda _, acts: acts.revoke_key(key_id))
    return answer(key.as_object())
