"""API keys: 256 random bits, shown once, stored as a keyed hash.

A dump of the table is useless without the pepper, which lives outside the database. Look-up is
by the hash of the whole key, so no prefix of a key says anything about another. Whether a key has
expired is told by the database's clock alone.
"""

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.errors import NotFound
from control.identity.page import MAX_SHOWN, Page, bad_cursor
from control.identity.tenants import seconds_or_none

KEY_PREFIX = "hr-"
SCOPES = ("inference", "batch", "usage", "admin")
MAX_KEY_LENGTH = 128
MIN_PEPPER_BYTES = 32
MAX_RESUME_GRACE_S = 60
MAX_LIFE_S = 10 * 366 * 86_400
SHOWN_LENGTH = 7

_KEY_ID = re.compile(r"key_[0-9a-f]{24}")
_SELECT = """SELECT key_id, tenant_id, scopes, prefix, created_at, revoked_at, name, expires_at,
    resume_grace_s, last_used_at, replaced_by FROM api_keys"""
_USABLE = """SELECT 1 FROM api_keys k JOIN tenants t USING (tenant_id)
    WHERE k.key_id = :key_id AND k.revoked_at IS NULL AND t.suspended_at IS NULL
      AND (k.expires_at IS NULL OR k.expires_at > now())"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the service knows of a key: everything but the key.

    `resume_grace_s` is how long a request of this key lives on after its connection broke. After
    a rotation `replaced_by` names the key to use instead, and `expires_at` is the end of the grace.
    """

    key_id: str
    tenant_id: str
    scopes: frozenset[str]
    prefix: str
    created_at: datetime
    revoked_at: datetime | None
    name: str = ""
    expires_at: datetime | None = None
    resume_grace_s: int = 0
    last_used_at: datetime | None = None
    replaced_by: str | None = None

    def as_object(self) -> dict[str, object]:
        """The key as the API and the audit log show it: nothing that opens a door."""
        return {
            "id": self.key_id,
            "object": "api_key",
            "tenant_id": self.tenant_id,
            "name": self.name,
            "scopes": sorted(self.scopes),
            "prefix": self.prefix,
            "resume_grace_s": self.resume_grace_s,
            "created_at": int(self.created_at.timestamp()),
            "expires_at": seconds_or_none(self.expires_at),
            "revoked_at": seconds_or_none(self.revoked_at),
            "last_used_at": seconds_or_none(self.last_used_at),
            "replaced_by": self.replaced_by,
        }


@dataclass(frozen=True, slots=True)
class KeyWish:
    """What a new key is to be. `expires_at` is compared with the database's clock."""

    scopes: frozenset[str]
    name: str = ""
    expires_at: datetime | None = None
    resume_grace_s: int = 0


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that may be used now, with what is true of its tenant.

    `lives_s` is how many more seconds it may be used, None if it does not expire.
    """

    key: ApiKey
    is_operator: bool
    is_suspended: bool
    lives_s: float | None


def hash_key(pepper: bytes, key: str) -> bytes:
    """HMAC-SHA-256 of the key under the service's pepper (at least 32 bytes)."""
    assert len(pepper) >= MIN_PEPPER_BYTES
    return hmac.new(pepper, key.encode(), sha256).digest()


def is_well_formed(key: str) -> bool:
    """True if the text could be a key of ours; anything else is refused without a query."""
    return key.startswith(KEY_PREFIX) and len(key) <= MAX_KEY_LENGTH and key.isascii()


def create_key(
    connection: Connection, pepper: bytes, tenant_id: str, wish: KeyWish | frozenset[str]
) -> tuple[ApiKey, str]:
    """Mint a key for a tenant. Returns its record and the key itself, which is not kept.

    Scopes alone are the wish for a key without name or end.
    """
    if not isinstance(wish, KeyWish):
        wish = KeyWish(wish)
    unknown = wish.scopes.difference(SCOPES)
    if unknown or not wish.scopes:
        raise ValueError(f"scopes must be some of {', '.join(SCOPES)}; got {sorted(wish.scopes)}")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    key_id = "key_" + secrets.token_hex(12)
    added = connection.execute(
        text(
            """
            INSERT INTO api_keys
                (key_id, tenant_id, key_hash, prefix, scopes, name, expires_at, resume_grace_s)
            SELECT :key_id, tenant_id, :key_hash, :prefix, :scopes, :name, :expires_at, :grace
            FROM tenants WHERE tenant_id = :tenant_id
            """
        ),
        {
            "key_id": key_id,
            "tenant_id": tenant_id,
            "key_hash": hash_key(pepper, key),
            "prefix": key[:SHOWN_LENGTH],
            "scopes": sorted(wish.scopes),
            "name": wish.name,
            "expires_at": wish.expires_at,
            "grace": wish.resume_grace_s,
        },
    )
    if added.rowcount != 1:
        raise NotFound(f"There is no tenant {tenant_id!r}.")
    return get_key(connection, key_id), key


def get_key(connection: Connection, key_id: str, *, for_update: bool = False) -> ApiKey:
    """The key of that id. Raises NotFound. `for_update` lets nobody else change it meanwhile."""
    row = None
    if _KEY_ID.fullmatch(key_id):
        lock = "FOR NO KEY UPDATE" if for_update else ""
        row = connection.execute(
            text(f"{_SELECT} WHERE key_id = :key_id {lock}"),
            {"key_id": key_id},
        ).one_or_none()
    if row is None:
        raise no_such_key(key_id)
    return _record(row)


def no_such_key(key_id: str) -> NotFound:
    """What is said of every key that the caller may not see."""
    return NotFound(f"There is no key {key_id[:MAX_SHOWN]!a}.", param="key_id")


def list_keys(
    connection: Connection, tenant_id: str | None = None, page: Page | None = None
) -> tuple[list[ApiKey], bool]:
    """One page of one tenant's keys, or of all, oldest first, and whether there are more.

    Raises InvalidRequest for a cursor that is no key in the list.
    """
    page = page or Page()
    values: dict[str, object] = {"tenant_id": tenant_id, "limit": page.limit + 1}
    beyond = ""
    if page.after is not None:
        values["cursor_at"] = _cursor(connection, tenant_id, page.after)
        values["cursor_id"] = page.after
        beyond = "AND (created_at, key_id) > (:cursor_at, :cursor_id)"
    rows = connection.execute(
        text(
            f"""
            {_SELECT} WHERE (CAST(:tenant_id AS text) IS NULL OR tenant_id = :tenant_id) {beyond}
            ORDER BY created_at, key_id LIMIT :limit
            """
        ),
        values,
    )
    return page.cut([_record(row) for row in rows])


def change_key(connection: Connection, key_id: str, name: str, resume_grace_s: int) -> ApiKey:
    """Give the key another name or grace."""
    connection.execute(
        text("UPDATE api_keys SET name = :name, resume_grace_s = :grace WHERE key_id = :key_id"),
        {"key_id": key_id, "name": name, "grace": resume_grace_s},
    )
    return get_key(connection, key_id)


def replace_key(connection: Connection, key_id: str, new_key_id: str, grace_s: int) -> ApiKey:
    """Let the key end in favour of another: `grace_s` from now, or when it would have ended."""
    connection.execute(
        text(
            """
            UPDATE api_keys
            SET replaced_by = :new,
                expires_at = least(expires_at, now() + make_interval(secs => :grace_s))
            WHERE key_id = :key_id
            """
        ),
        {"key_id": key_id, "new": new_key_id, "grace_s": grace_s},
    )
    return get_key(connection, key_id)


def revoke_key(connection: Connection, key_id: str) -> bool:
    """Refuse the key from now on; gateways follow within their cache time (5 s)."""
    result = connection.execute(
        text(
            "UPDATE api_keys SET revoked_at = now() WHERE key_id = :key_id AND revoked_at IS NULL"
        ),
        {"key_id": key_id},
    )
    return result.rowcount == 1


async def note_uses(connection: AsyncConnection, key_ids: Sequence[str]) -> None:
    """Remember that these keys were used just now, in one statement.

    A key that somebody changes at this moment is left out: nothing waits for this, and this waits
    for nothing.
    """
    await connection.execute(
        text(
            """
            UPDATE api_keys SET last_used_at = now() WHERE key_id IN (
                SELECT key_id FROM api_keys WHERE key_id = ANY(:key_ids)
                FOR NO KEY UPDATE SKIP LOCKED)
            """
        ),
        {"key_ids": list(key_ids)},
    )


async def find_key(connection: AsyncConnection, key_hash: bytes) -> FoundKey | None:
    """The usable key of that hash, in one indexed query."""
    return (await find_keys(connection, [key_hash])).get(key_hash)


async def find_keys(connection: AsyncConnection, key_hashes: list[bytes]) -> dict[bytes, FoundKey]:
    """The keys among those hashes that are neither revoked nor expired, in one indexed query."""
    rows = await connection.execute(
        text(
            """
            SELECT k.key_hash, t.is_operator, t.suspended_at IS NOT NULL,
                   CAST(extract(epoch FROM k.expires_at - now()) AS double precision),
                   k.key_id, k.tenant_id, k.scopes, k.prefix, k.created_at, k.revoked_at, k.name,
                   k.expires_at, k.resume_grace_s, k.last_used_at, k.replaced_by
            FROM api_keys k JOIN tenants t USING (tenant_id)
            WHERE k.key_hash = ANY(:key_hashes) AND k.revoked_at IS NULL
              AND (k.expires_at IS NULL OR k.expires_at > now())
            """
        ),
        {"key_hashes": key_hashes},
    )
    found = {}
    for row in rows:
        key_hash, is_operator, is_suspended, lives_s, *columns = tuple(row)
        found[bytes(key_hash)] = FoundKey(_record(columns), is_operator, is_suspended, lives_s)
    return found


def is_usable(connection: Connection, key_id: str, *, is_locked: bool) -> bool:
    """True if the key may be used at this moment. Locked, nobody can revoke it before the
    transaction ends.
    """
    lock = "FOR NO KEY UPDATE OF k" if is_locked else ""
    found = connection.execute(text(f"{_USABLE} {lock}"), {"key_id": key_id})
    return found.one_or_none() is not None


def _cursor(connection: Connection, tenant_id: str | None, after: str) -> datetime:
    try:
        key = get_key(connection, after)
    except NotFound:
        raise bad_cursor("key", after) from None
    if tenant_id not in (None, key.tenant_id):
        raise bad_cursor("key", after)
    return key.created_at


def _record(row: Row[Any] | Sequence[Any]) -> ApiKey:
    key_id, tenant_id, scopes, *others = tuple(row)
    return ApiKey(key_id, tenant_id, frozenset(scopes), *others)
