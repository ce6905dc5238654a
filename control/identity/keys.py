"""API keys: 256 random bits, shown once, stored as a keyed hash.

A dump of the table is useless without the pepper, which lives outside the database. Look-up is
by the hash of the whole key, so no prefix of a key says anything about another.
"""

import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.errors import NotFound

KEY_PREFIX = "hr-"
SCOPES = ("inference", "batch", "usage", "admin")
MAX_KEY_LENGTH = 128
MIN_PEPPER_BYTES = 32


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the service knows of a key: everything but the key."""

    key_id: str
    tenant_id: str
    scopes: frozenset[str]
    prefix: str
    created_at: datetime
    revoked_at: datetime | None


def hash_key(pepper: bytes, key: str) -> bytes:
    """HMAC-SHA-256 of the key under the service's pepper (at least 32 bytes)."""
    assert len(pepper) >= MIN_PEPPER_BYTES
    return hmac.new(pepper, key.encode(), sha256).digest()


def is_well_formed(key: str) -> bool:
    """True if the text could be a key of ours; anything else is refused without a query."""
    return key.startswith(KEY_PREFIX) and len(key) <= MAX_KEY_LENGTH and key.isascii()


def create_key(
    connection: Connection, pepper: bytes, tenant_id: str, scopes: frozenset[str]
) -> tuple[ApiKey, str]:
    """Mint a key for a tenant. Returns its record and the key itself, which is not kept."""
    unknown = scopes.difference(SCOPES)
    if unknown or not scopes:
        raise ValueError(f"scopes must be some of {', '.join(SCOPES)}; got {sorted(scopes)}")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = connection.execute(
        text(
            """
            INSERT INTO api_keys (key_id, tenant_id, key_hash, prefix, scopes)
            SELECT :key_id, tenant_id, :key_hash, :prefix, :scopes
            FROM tenants WHERE tenant_id = :tenant_id
            RETURNING key_id, tenant_id, scopes, prefix, created_at, revoked_at
            """
        ),
        {
            "key_id": "key_" + secrets.token_hex(12),
            "tenant_id": tenant_id,
            "key_hash": hash_key(pepper, key),
            "prefix": key[:7],
            "scopes": sorted(scopes),
        },
    ).one_or_none()
    if row is None:
        raise NotFound(f"There is no tenant {tenant_id!r}.")
    return _record(row), key


def list_keys(connection: Connection, tenant_id: str | None = None) -> list[ApiKey]:
    """Keys of one tenant, or of all, oldest first."""
    rows = connection.execute(
        text(
            """
            SELECT key_id, tenant_id, scopes, prefix, created_at, revoked_at FROM api_keys
            WHERE :tenant_id ::text IS NULL OR tenant_id = :tenant_id
            ORDER BY created_at, key_id
            """
        ),
        {"tenant_id": tenant_id},
    )
    return [_record(row) for row in rows]


def revoke_key(connection: Connection, key_id: str) -> bool:
    """Refuse the key from now on; gateways follow within their cache time (5 s)."""
    result = connection.execute(
        text(
            "UPDATE api_keys SET revoked_at = now() WHERE key_id = :key_id AND revoked_at IS NULL"
        ),
        {"key_id": key_id},
    )
    return result.rowcount == 1


async def find_key(connection: AsyncConnection, key_hash: bytes) -> ApiKey | None:
    """The unrevoked key of that hash, in one indexed query."""
    return (await find_keys(connection, [key_hash])).get(key_hash)


async def find_keys(connection: AsyncConnection, key_hashes: list[bytes]) -> dict[bytes, ApiKey]:
    """The unrevoked keys among those hashes, by hash, in one indexed query."""
    rows = await connection.execute(
        text(
            """
            SELECT key_hash, key_id, tenant_id, scopes, prefix, created_at, revoked_at
            FROM api_keys WHERE key_hash = ANY(:key_hashes) AND revoked_at IS NULL
            """
        ),
        {"key_hashes": key_hashes},
    )
    return {
        bytes(key_hash): ApiKey(
            key_id, tenant_id, frozenset(scopes), prefix, created_at, revoked_at
        )
        for key_hash, key_id, tenant_id, scopes, prefix, created_at, revoked_at in rows
    }


def _record(row: Row[Any]) -> ApiKey:
    key_id, tenant_id, scopes, prefix, created_at, revoked_at = tuple(row)
    return ApiKey(key_id, tenant_id, frozenset(scopes), prefix, created_at, revoked_at)
