"""The schema can be brought up and down, by several starters at once."""

from concurrent.futures import ThreadPoolExecutor

import psycopg

from control.database.connection import connect_async
from control.database.migrate import downgrade, upgrade
from control.identity.keys import find_key, hash_key
from tests.servers import Servers


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
    return {name for (name,) in rows}


def test_a_downgrade_leaves_nothing_and_an_upgrade_brings_all_back(servers: Servers) -> None:
    url = servers.new_database()
    before = tables(url)
    assert {"requests", "usage_events", "batches"} <= before
    downgrade(url, "base")
    assert tables(url) == {"alembic_version"}
    upgrade(url)
    assert tables(url) == before


def test_starters_at_once_migrate_once(servers: Servers) -> None:
    url = servers.new_database()
    downgrade(url, "base")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(upgrade, [url] * 3))
    with psycopg.connect(url) as connection:
        invalid = connection.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid")
        assert invalid.fetchone() == (0,)
    assert "requests" in tables(url)


async def test_keys_outlive_the_migration_that_lets_them_expire(servers: Servers) -> None:
    """And what a process of the version before writes is taken beside it."""
    url, pepper = servers.new_database(), b"p" * 32
    insert = (
        b"INSERT INTO api_keys (key_id, tenant_id, key_hash, prefix, scopes) "
        b"VALUES (%s, 'tnt', %s, 'hr-old', '{inference}')"
    )
    downgrade(url, "0003")
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO tenants (tenant_id, name) VALUES ('tnt', 'old')")
        connection.execute(insert, ("before", hash_key(pepper, "hr-before")))
    upgrade(url)
    with psycopg.connect(url) as connection:
        connection.execute(insert, ("beside", hash_key(pepper, "hr-beside")))
    engine = connect_async(url, "test", pool_size=1)
    async with engine.connect() as reader:
        for key_id in ("before", "beside"):
            found = await find_key(reader, hash_key(pepper, f"hr-{key_id}"))
            assert found is not None
            assert (found.key.key_id, found.lives_s, found.is_suspended) == (key_id, None, False)
    await engine.dispose()
    downgrade(url, "0003")
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM api_keys").fetchone() == (2,)
