"""Tenants over HTTP. Only an operator makes, names, suspends or resumes one; any administrator sees
what it reaches.
"""

from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import Response

from api.admin_bodies import NewTenant
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
from control.identity.administration import Administration
from control.identity.page import Page
from control.identity.tenants import Tenant

router = APIRouter()


@router.post("/admin/tenants")
async def create_tenant(request: Request, caller: AdminCaller) -> Response:
    """Add a tenant. Operators are made at the database alone, by `headrace admin`."""
    body = NewTenant.parse(await read_fields(request))
    tenant = await change(request, caller, lambda _, acts: acts.add_tenant(body.name))
    return answer(tenant.as_object())


@router.get("/admin/tenants")
async def list_tenants(
    request: Request,
    caller: AdminCaller,
    limit: Limit = USUAL_LIMIT,
    after: str | None = None,
    name: Filter | None = None,
) -> Response:
    """One page of the tenants in reach, oldest first."""

    def act(_: Connection, acts: Administration) -> tuple[list[Tenant], bool]:
        return acts.tenants(Page(limit, after), name)

    tenants, has_more = await look(request, caller, act)
    ids = [tenant.tenant_id for tenant in tenants]
    return answer(page_object([tenant.as_object() for tenant in tenants], ids, has_more))


@router.get("/admin/tenants/{tenant_id}")
async def show_tenant(request: Request, tenant_id: str, caller: AdminCaller) -> Response:
    """One tenant."""
    tenant = await look(request, caller, lambda _, acts: acts.tenant(tenant_id))
    return answer(tenant.as_object())


@router.post("/admin/tenants/{tenant_id}")
async def rename_tenant(request: Request, tenant_id: str, caller: AdminCaller) -> Response:
    """Give a tenant another name; its id stays."""
    body = NewTenant.parse(await read_fields(request))
    tenant = await change(request, caller, lambda _, acts: acts.rename_tenant(tenant_id, body.name))
    return answer(tenant.as_object())


@router.post("/admin/tenants/{tenant_id}/suspend")
async def suspend_tenant(request: Request, tenant_id: str, caller: AdminCaller) -> Response:
    """Refuse all keys of a tenant within seconds, until it is resumed."""
    tenant = await change(request, caller, lambda _, acts: acts.suspend_tenant(tenant_id))
    return answer(tenant.as_object())


@router.post("/admin/tenants/{tenant_id}/resume")
async def resume_tenant(request: Request, tenant_id: str, caller: AdminCaller) -> Response:
    """Take a suspended tenant's keys again."""
    tenant = await change(request, caller, lambda _, acts: acts.resume_tenant(tenant_id))
    return answer(tenant.as_object())
