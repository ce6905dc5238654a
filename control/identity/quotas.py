"""Quotas: what a tenant may use of a model in a minute, at once, and in waiting batches.

They are stored here; admission enforces them. The model `*` stands for all models together that
have no quota of their own. `max_concurrent` counts over all models, so it is said for `*` alone.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from control.errors import ModelNotFound, NotFound
from control.identity.page import MAX_SHOWN, Page, bad_cursor
from engine.interface.errors import InvalidRequest

EVERY_MODEL = "*"

_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_SELECT = """SELECT tenant_id, model, tokens_per_minute, requests_per_minute, max_concurrent,
    max_enqueued_tokens, updated_at FROM quotas WHERE tenant_id = :tenant_id"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits themselves, each at least 1; None is no limit, and at least one is set."""

    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    max_enqueued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant for a model, or for all together that have none of their own."""

    tenant_id: str
    model: str
    limits: Limits
    updated_at: datetime

    def as_object(self) -> dict[str, object]:
        """The quota as the API and the audit log show it."""
        return {
            "object": "quota",
            "tenant_id": self.tenant_id,
            "model": self.model,
            "tokens_per_minute": self.limits.tokens_per_minute,
            "requests_per_minute": self.limits.requests_per_minute,
            "max_concurrent": self.limits.max_concurrent,
            "max_enqueued_tokens": self.limits.max_enqueued_tokens,
            "updated_at": int(self.updated_at.timestamp()),
        }


def set_quota(connection: Connection, tenant_id: str, model: str, limits: Limits) -> Quota:
    """Put the limits in force in place of those there were.

    Raises ModelNotFound, or InvalidRequest for a limit that is not one of a single model.
    """
    _check_model(connection, model)
    if model != EVERY_MODEL and limits.max_concurrent is not None:
        raise InvalidRequest(
            f"max_concurrent counts over all models: set it for `{EVERY_MODEL}`.",
            param="max_concurrent",
        )
    connection.execute(
        text(
            """
            INSERT INTO quotas (tenant_id, model, tokens_per_minute, requests_per_minute,
                                max_concurrent, max_enqueued_tokens)
            VALUES (:tenant_id, :model, :tokens, :requests, :concurrent, :enqueued)
            ON CONFLICT (tenant_id, model) DO UPDATE SET
                tokens_per_minute = excluded.tokens_per_minute,
                requests_per_minute = excluded.requests_per_minute,
                max_concurrent = excluded.max_concurrent,
                max_enqueued_tokens = excluded.max_enqueued_tokens,
                updated_at = now()
            """
        ),
        {
            "tenant_id": tenant_id,
            "model": model,
            "tokens": limits.tokens_per_minute,
            "requests": limits.requests_per_minute,
            "concurrent": limits.max_concurrent,
            "enqueued": limits.max_enqueued_tokens,
        },
    )
    quota = find_quota(connection, tenant_id, model)
    assert quota is not None
    return quota


def find_quota(connection: Connection, tenant_id: str, model: str) -> Quota | None:
    """The quota that is set for just this tenant and model."""
    row = None
    if model == EVERY_MODEL or _MODEL.fullmatch(model):
        row = connection.execute(
            text(f"{_SELECT} AND model = :model"),
            {"tenant_id": tenant_id, "model": model},
        ).one_or_none()
    return None if row is None else _quota(row)


def no_such_quota(model: str) -> NotFound:
    """What is said of a quota that is not set."""
    return NotFound(f"This tenant has no quota for the model {model[:MAX_SHOWN]!a}.", param="model")


def list_quotas(connection: Connection, tenant_id: str, page: Page) -> tuple[list[Quota], bool]:
    """One page of the tenant's quotas by model, and whether there are more.

    The cursor is a model's name. Raises InvalidRequest for one without a quota.
    """
    after = page.after
    if after is not None and find_quota(connection, tenant_id, after) is None:
        raise bad_cursor("quota", after)
    rows = connection.execute(
        text(
            f"""
            {_SELECT} AND (CAST(:after AS text) IS NULL OR model COLLATE "C" > :after)
            ORDER BY model COLLATE "C" LIMIT :limit
            """
        ),
        {"tenant_id": tenant_id, "after": after, "limit": page.limit + 1},
    )
    return page.cut([_quota(row) for row in rows])


def remove_quota(connection: Connection, tenant_id: str, model: str) -> None:
    """Lift the limits."""
    connection.execute(
        text("DELETE FROM quotas WHERE tenant_id = :tenant_id AND model = :model"),
        {"tenant_id": tenant_id, "model": model},
    )


def _check_model(connection: Connection, model: str) -> None:
    """A limit for a name that nothing has would never limit anything."""
    if model == EVERY_MODEL:
        return
    found = None
    if _MODEL.fullmatch(model):
        found = connection.execute(
            text("SELECT 1 FROM models WHERE model = :model"), {"model": model}
        ).one_or_none()
    if found is None:
        raise ModelNotFound(
            f"There is no model {model[:MAX_SHOWN]!a}; `*` stands for every model.", param="model"
        )


def _quota(row: Row[Any]) -> Quota:
    tenant_id, model, *limits, updated_at = tuple(row)
    return Quota(tenant_id, model, Limits(*limits), updated_at)
