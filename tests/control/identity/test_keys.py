"""Keys: shown once, stored as a keyed hash, found by the whole of it, refused once revoked."""

import secrets
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, text

from control.database.connection import connect, connect_async
from control.errors import Conflict, NotFound
from control.identity.keys import (
    FoundKey,
    create_key,
    find_key,
    find_keys,
    hash_key,
    is_well_formed,
    list_keys,
    revoke_key,
)
from control.identity.page import Page
from control.identity.tenants import create_tenant, list_tenants

PEPPER = b"p" * 32


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    engine = connect(database_url, "test")
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def test_nothing_stored_opens_the_door(connection: Connection) -> None:
    tenant = create_tenant(connection, secrets.token_hex(8))
    key, secret = create_key(connection, PEPPER, tenant.tenant_id, frozenset({"inference"}))
    rows = connection.execute(
        text("SELECT to_jsonb(k)::text, key_hash FROM api_keys k WHERE key_id = :id"),
        {"id": key.key_id},
    ).one()
    assert secret[len("hr-") + 4 :] not in rows[0]
    assert bytes(rows[1]) == hash_key(PEPPER, secret)
    assert bytes(rows[1]) != hash_key(b"q" * 32, secret)
    assert is_well_formed(secret)


async def test_a_key_is_found_by_the_whole_of_it_until_it_is_revoked(database_url: str) -> None:
    engine, async_engine = connect(database_url, "test"), connect_async(database_url, "test")
    with engine.begin() as connection:
        tenant = create_tenant(connection, secrets.token_hex(8))
        key, secret = create_key(connection, PEPPER, tenant.tenant_id, frozenset({"batch"}))
    async with async_engine.connect() as reader:
        both = [hash_key(PEPPER, "hr-unknown"), hash_key(PEPPER, secret)]
        found = FoundKey(key, is_operator=False, is_suspended=False, lives_s=None)
        assert await find_keys(reader, both) == {both[1]: found}
        assert await find_key(reader, hash_key(PEPPER, secret)) == found
        assert await find_key(reader, hash_key(PEPPER, secret[:-1])) is None
    with engine.begin() as connection:
        assert revoke_key(connection, key.key_id)
        assert not revoke_key(connection, key.key_id)
        (listed,), _ = list_keys(connection, tenant.tenant_id)
        assert listed.revoked_at is not None
    async with async_engine.connect() as reader:
        assert await find_key(reader, hash_key(PEPPER, secret)) is None
    engine.dispose()
    await async_engine.dispose()


def test_keys_need_a_tenant_and_known_scopes(connection: Connection) -> None:
    with pytest.raises(NotFound):
        create_key(connection, PEPPER, "tnt_nobody", frozenset({"inference"}))
    for scopes in (frozenset[str](), frozenset({"root"})):
        with pytest.raises(ValueError, match="scopes"):
            create_key(connection, PEPPER, "tnt_nobody", scopes)


def test_a_tenant_name_is_taken_once(connection: Connection) -> None:
    tenant = create_tenant(connection, secrets.token_hex(8))
    assert tenant in list_tenants(connection, Page(1000))[0]
    with pytest.raises(Conflict):
        create_tenant(connection, tenant.name)
