"""The schema can be brought up and down, by several starters at once."""

from concurrent.futures import ThreadPoolExecutor

import psycopg

from control.database.migrate import downgrade, upgrade
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
