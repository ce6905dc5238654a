"""Two tenants with a key each, so that the first conversation needs no administration: one asks,
and one, an operator, administers.

The keys are shown once by the service and kept in `<data-dir>/demo.env`; a later start reuses
them for as long as they are valid, and mints new ones when they are not.
"""

from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from cli.administering import person
from cli.env_file import read_env_file, write_env_file
from cli.settings import ADMIN_KEY, API_KEY, BASE_URL
from control.identity.administration import Administration
from control.identity.keys import KeyWish, find_key, hash_key
from control.identity.tenants import find_tenant_by_name

DEMO_FILE = "demo.env"
_DEMO = "demo"
_OPERATOR = "operator"
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
        found = await find_key(connection, hash_key(pepper, key)) if key else None
        if found is None or found.is_suspended or found.is_operator != (name == ADMIN_KEY):
            key = await connection.run_sync(_mint, pepper, scopes, is_operator=name == ADMIN_KEY)
        keys[name] = key
    await connection.commit()
    write_env_file(path, {BASE_URL: base_url, **keys})
    return DemoAccess(base_url, keys[API_KEY], keys[ADMIN_KEY])


def _mint(
    connection: Connection, pepper: bytes, scopes: frozenset[str], *, is_operator: bool
) -> str:
    acts = Administration(connection, person())
    name = _OPERATOR if is_operator else _DEMO
    tenant = find_tenant_by_name(connection, name)
    tenant = tenant or acts.add_tenant(name, is_operator=is_operator)
    _, key = acts.mint_key(pepper, tenant.tenant_id, KeyWish(scopes, "made by headrace serve"))
    return key
