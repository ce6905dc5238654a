"""Quotas over HTTP. Only an operator sets them; a tenant's administrator sees its own."""

from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import Response

from api.admin_bodies import NewQuota
from api.administrators import (
    USUAL_LIMIT,
    Limit,
    answer,
    change,
    look,
    page_object,
    read_fields,
)
from api.callers import AdminCaller
from control.identity.administration import Administration
from control.identity.page import Page
from control.identity.quotas import Quota

router = APIRouter()


@router.get("/admin/tenants/{tenant_id}/quotas")
async def list_quotas(
    request: Request,
    tenant_id: str,
    caller: AdminCaller,
    limit: Limit = USUAL_LIMIT,
    after: str | None = None,
) -> Response:
    """One page of a tenant's quotas; the cursor is a model's name."""

    def act(_: Connection, acts: Administration) -> tuple[list[Quota], bool]:
        return acts.quotas(tenant_id, Page(limit, after))

    quotas, has_more = await look(request, caller, act)
    models = [quota.model for quota in quotas]
    return answer(page_object([quota.as_object() for quota in quotas], models, has_more))


@router.get("/admin/tenants/{tenant_id}/quotas/{model}")
async def show_quota(request: Request, tenant_id: str, model: str, caller: AdminCaller) -> Response:
    """The quota that is set for just this model, or for `*`."""
    quota = await look(request, caller, lambda _, acts: acts.quota(tenant_id, model))
    return answer(quota.as_object())


@router.put("/admin/tenants/{tenant_id}/quotas/{model}")
async def set_quota(request: Request, tenant_id: str, model: str, caller: AdminCaller) -> Response:
    """Put limits in force in place of those there were; what is left out is not limited."""
    body = NewQuota.parse(await read_fields(request))
    quota = await change(
        request, caller, lambda _, acts: acts.set_quota(tenant_id, model, body.limits)
    )
    return answer(quota.as_object())


@router.delete("/admin/tenants/{tenant_id}/quotas/{model}")
async def remove_quota(
    request: Request, tenant_id: str, model: str, caller: AdminCaller
) -> Response:
    """Lift the limits."""
    quota = await change(request, caller, lambda _, acts: acts.remove_quota(tenant_id, model))
    return answer({**quota.as_object(), "deleted": True})
