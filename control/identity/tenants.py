"""Tenants: who is served, limited and billed. A tenant is known only by its keys.

An operator is a tenant that runs the service: its keys with the scope `admin` administer every
tenant. A suspended tenant's keys are all refused until it is resumed.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from control.errors import Conflict, NotFound
from control.identity.page import MAX_SHOWN, Page, bad_cursor

MAX_NAME = 200

_TENANT_ID = re.compile(r"tnt_[0-9a-f]{24}")
_SELECT = "SELECT tenant_id, name, created_at, is_operator, suspended_at FROM tenants"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the service; `name` is for people, `tenant_id` for everything else."""

    tenant_id: str
    name: str
    created_at: datetime
    is_operator: bool = False
    suspended_at: datetime | None = None

    def as_object(self) -> dict[str, object]:
        """The tenant as the API and the audit log show it."""
        return {
            "id": self.tenant_id,
            "object": "tenant",
            "name": self.name,
            "is_operator": self.is_operator,
            "created_at": int(self.created_at.timestamp()),
            "suspended_at": seconds_or_none(self.suspended_at),
        }


def seconds_or_none(moment: datetime | None) -> int | None:
    """Whole seconds UTC, as the API shows a moment that may not have come."""
    return None if moment is None else int(moment.timestamp())


def create_tenant(connection: Connection, name: str, *, is_operator: bool = False) -> Tenant:
    """Add a tenant. Raises Conflict if the name is taken."""
    tenant_id = "tnt_" + secrets.token_hex(12)
    added = connection.execute(
        text(
            """
            INSERT INTO tenants (tenant_id, name, is_operator)
            VALUES (:tenant_id, :name, :is_operator) ON CONFLICT (name) DO NOTHING
            """
        ),
        {"tenant_id": tenant_id, "name": name, "is_operator": is_operator},
    )
    if added.rowcount != 1:
        raise _taken(name)
    return find_tenant(connection, tenant_id)


def find_tenant(connection: Connection, tenant_id: str, *, for_update: bool = False) -> Tenant:
    """The tenant of that id. Raises NotFound. `for_update` lets nobody else change it meanwhile."""
    row = None
    if _TENANT_ID.fullmatch(tenant_id):
        lock = "FOR NO KEY UPDATE" if for_update else ""
        row = connection.execute(
            text(f"{_SELECT} WHERE tenant_id = :tenant_id {lock}"),
            {"tenant_id": tenant_id},
        ).one_or_none()
    if row is None:
        raise no_such_tenant(tenant_id)
    return Tenant(*row)


def find_tenant_by_name(connection: Connection, name: str) -> Tenant | None:
    """The tenant of that name, if there is one."""
    row = connection.execute(text(f"{_SELECT} WHERE name = :name"), {"name": name}).one_or_none()
    return None if row is None else Tenant(*row)


def no_such_tenant(tenant_id: str) -> NotFound:
    """What is said of every tenant that the caller may not see."""
    return NotFound(f"There is no tenant {tenant_id[:MAX_SHOWN]!a}.", param="tenant_id")


def list_tenants(
    connection: Connection, page: Page, name: str | None = None
) -> tuple[list[Tenant], bool]:
    """One page, oldest first, of those of that name or of all, and whether there are more.

    Raises InvalidRequest for a cursor that is no tenant.
    """
    values: dict[str, object] = {"limit": page.limit + 1, "name": name}
    beyond = ""
    if page.after is not None:
        try:
            values["cursor_at"] = find_tenant(connection, page.after).created_at
        except NotFound:
            raise bad_cursor("tenant", page.after) from None
        values["cursor_id"] = page.after
        beyond = "AND (created_at, tenant_id) > (:cursor_at, :cursor_id)"
    rows = connection.execute(
        text(
            f"""
            {_SELECT} WHERE (CAST(:name AS text) IS NULL OR name = :name) {beyond}
            ORDER BY created_at, tenant_id LIMIT :limit
            """
        ),
        values,
    )
    return page.cut([Tenant(*row) for row in rows])


def rename_tenant(connection: Connection, tenant_id: str, name: str) -> Tenant:
    """Give the tenant another name. Raises Conflict if it is taken."""
    try:
        with connection.begin_nested():
            connection.execute(
                text("UPDATE tenants SET name = :name WHERE tenant_id = :tenant_id"),
                {"tenant_id": tenant_id, "name": name},
            )
    except IntegrityError as error:
        raise _taken(name) from error
    return find_tenant(connection, tenant_id)


def set_suspended(connection: Connection, tenant_id: str, is_suspended: bool) -> Tenant:
    """Refuse all keys of the tenant from now on, or no longer; gateways follow within 5 s."""
    connection.execute(
        text(
            """
            UPDATE tenants
            SET suspended_at = CASE WHEN :is_suspended THEN coalesce(suspended_at, now()) END
            WHERE tenant_id = :tenant_id
            """
        ),
        {"tenant_id": tenant_id, "is_suspended": is_suspended},
    )
    return find_tenant(connection, tenant_id)


def _taken(name: str) -> Conflict:
    return Conflict(f"A tenant named {name!r} exists already.")
