"""Tenants: who is served, limited and billed. A tenant is known only by its keys."""

import secrets
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from control.errors import Conflict


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the service; `name` is for people, `tenant_id` for everything else."""

    tenant_id: str
    name: str
    created_at: datetime


def create_tenant(connection: Connection, name: str) -> Tenant:
    """Add a tenant. Raises Conflict if the name is taken."""
    row = connection.execute(
        text(
            """
            INSERT INTO tenants (tenant_id, name) VALUES (:tenant_id, :name)
            ON CONFLICT (name) DO NOTHING RETURNING tenant_id, name, created_at
            """
        ),
        {"tenant_id": "tnt_" + secrets.token_hex(12), "name": name},
    ).one_or_none()
    if row is None:
        raise Conflict(f"A tenant named {name!r} exists already.")
    return Tenant(*row)


def list_tenants(connection: Connection) -> list[Tenant]:
    """All tenants, oldest first."""
    rows = connection.execute(
        text("SELECT tenant_id, name, created_at FROM tenants ORDER BY created_at, tenant_id")
    )
    return [Tenant(*row) for row in rows]
