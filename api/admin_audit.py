"""The audit log over HTTP: all of it for an operator, its own part for a tenant."""

from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import Response

from api.administrators import USUAL_LIMIT, Filter, Limit, answer, look, page_object
from api.callers import AdminCaller
from control.identity.administration import Administration
from control.identity.audit import AuditFilter, AuditRecord
from control.identity.page import Page

router = APIRouter()


@router.get("/admin/audit")
async def list_audit(  # noqa: PLR0913, PLR0917 - each is a parameter of the route
    request: Request,
    caller: AdminCaller,
    limit: Limit = USUAL_LIMIT,
    after: str | None = None,
    tenant_id: Filter | None = None,
    action: Filter | None = None,
    actor_id: Filter | None = None,
    object_id: Filter | None = None,
) -> Response:
    """One page of what administrators did, newest first."""
    only = AuditFilter(tenant_id, action, actor_id, object_id)

    def act(_: Connection, acts: Administration) -> tuple[list[AuditRecord], bool]:
        return acts.audit(only, Page(limit, after))

    records, has_more = await look(request, caller, act)
    ids = [str(record.audit_id) for record in records]
    return answer(page_object([record.as_object() for record in records], ids, has_more))
