"""A tenant and two keys, so that the first conversation needs no administration.

The keys are shown once by the service and kept in `<data-dir>/demo.env`; a later start reuses
them for as long as they are valid, and mints new ones when they are not.
"""

from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from cli.env_file import read_env_file, write_env_file
from cli.settings import ADMIN_KEY, API_KEY, BASE_URL
from control.identity.keys import create_key, find_key, hash_key
from control.identity.tenants import create_tenant, list_tenants

DEMO_FILE = "demo.env"
_TENANT = "demo"
_SCOPES = {
    API_KEY: frozenset({"inference", "batch", "usage"}),
    ADMIN_KEY: frozenset({"admin"}),
}


@dataclass(frozen=True, slots=True)
class DemoAccess:
    """What a first client needs. `base_url` ends in /v1, as OpenAI's SDKs want it."""

    base_url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)


async def grant_demo_access(
    connection: AsyncConnection, pepper: bytes, data_dir: Path, base_url: str
) -> DemoAccess:
    """The demo tenant's keys, valid ones reused; commits, then writes `demo.env`."""
    path = data_dir / DEMO_FILE
    known = read_env_file(path)
    keys: dict[str, str] = {}
    for name, scopes in _SCOPES.items():
        key = known.get(name, "")
        if not key or await find_key(connection, hash_key(pepper, key)) is None:
            key = await connection.run_sync(_mint, pepper, scopes)
        keys[name] = key
    await connection.commit()
    write_env_file(path, {BASE_URL: base_url, **keys})
    return DemoAccess(base_url, keys[API_KEY], keys[ADMIN_KEY])


def _mint(connection: Connection, pepper: bytes, scopes: frozenset[str]) -> str:
    tenants = {tenant.name: tenant for tenant in list_tenants(connection)}
    tenant = tenants.get(_TENANT) or create_tenant(connection, _TENANT)
    _, key = create_key(connection, pepper, tenant.tenant_id, scopes)
    return key
