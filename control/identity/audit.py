"""The audit log: every change by an administrator, in the transaction that makes it.

Rows are values as the API shows them, so no secret can be among them. Nothing changes a row again:
the table refuses.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, text

from control.identity.authority import Administrator
from control.identity.page import Page, bad_cursor

Shown = dict[str, object]

_MAX_ID = 2**63 - 1


class Showable(Protocol):
    """What can be written down as the API shows it."""

    def as_object(self) -> Shown:
        """The thing as it is shown: no secret is among it."""
        ...


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One change. `before` is None for what was made, `after` for what was removed."""

    audit_id: int
    created_at: datetime
    actor_type: str
    actor_id: str
    action: str
    tenant_id: str | None
    object_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None

    def as_object(self) -> Shown:
        """The record as the API shows it."""
        return {
            "id": str(self.audit_id),
            "object": "audit_record",
            "created_at": int(self.created_at.timestamp()),
            "actor": {"type": self.actor_type, "id": self.actor_id},
            "action": self.action,
            "tenant_id": self.tenant_id,
            "object_id": self.object_id,
            "before": self.before,
            "after": self.after,
            "request_id": self.request_id,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """What was done, to what, whose it is, and what it was and is now."""

    action: str
    object_id: str
    tenant_id: str | None
    before: Shown | None
    after: Shown | None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which records to show; None is any."""

    tenant_id: str | None = None
    action: str | None = None
    actor_id: str | None = None
    object_id: str | None = None


def record(connection: Connection, administrator: Administrator, change: Change) -> None:
    """Write the change down; it is kept if and only if the change is."""
    connection.execute(
        text(
            """
            INSERT INTO audit_log (actor_type, actor_id, action, tenant_id, object_id,
                                   before, after, request_id)
            VALUES (:actor_type, :actor_id, :action, :tenant_id, :object_id,
                    CAST(:before AS jsonb), CAST(:after AS jsonb), :request_id)
            """
        ),
        {
            "actor_type": administrator.actor_type,
            "actor_id": administrator.actor_id,
            "action": change.action,
            "tenant_id": change.tenant_id,
            "object_id": change.object_id,
            "before": _json(change.before),
            "after": _json(change.after),
            "request_id": administrator.request_id,
        },
    )


def list_audit(
    connection: Connection, only: AuditFilter, page: Page
) -> tuple[list[AuditRecord], bool]:
    """One page, newest first, and whether there are more.

    Raises InvalidRequest for a cursor that is no record the asker may see.
    """
    rows = connection.execute(
        text(
            """
            SELECT audit_id, created_at, actor_type, actor_id, action, tenant_id, object_id,
                   before, after, request_id
            FROM audit_log
            WHERE (CAST(:tenant_id AS text) IS NULL OR tenant_id = :tenant_id)
              AND (CAST(:action AS text) IS NULL OR action = :action)
              AND (CAST(:actor_id AS text) IS NULL OR actor_id = :actor_id)
              AND (CAST(:object_id AS text) IS NULL OR object_id = :object_id)
              AND audit_id < :below
            ORDER BY audit_id DESC LIMIT :limit
            """
        ),
        {
            "tenant_id": only.tenant_id,
            "action": only.action,
            "actor_id": only.actor_id,
            "object_id": only.object_id,
            "below": _MAX_ID if page.after is None else _cursor(connection, only, page.after),
            "limit": page.limit + 1,
        },
    )
    return page.cut([AuditRecord(*row) for row in rows])


def _cursor(connection: Connection, only: AuditFilter, after: str) -> int:
    """The record's number, if the asker may see the record."""
    audit_id = int(after) if after.isascii() and after.isdecimal() and len(after) < 19 else 0
    found = connection.execute(
        text(
            """
            SELECT 1 FROM audit_log WHERE audit_id = :audit_id
              AND (CAST(:tenant_id AS text) IS NULL OR tenant_id = :tenant_id)
            """
        ),
        {"audit_id": audit_id, "tenant_id": only.tenant_id},
    ).one_or_none()
    if found is None:
        raise bad_cursor("audit record", after)
    return audit_id


def _json(shown: Shown | None) -> str | None:
    return None if shown is None else msgspec.json.encode(shown).decode()
