"""Every connection has limits: no statement, no lock and no idle transaction lasts for ever."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg.errors import LockNotAvailable, QueryCanceled
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from control.database import connection as connections
from control.database import migrate
from control.database.connection import connect, connect_async, driver_url
from tests.workers.service import until

ROOT = Path(__file__).resolve().parents[3]
LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
CONNECTING = {"create_engine", "create_async_engine", "AsyncConnection", "ConnectionPool"}


def limits_of(connection: Connection) -> dict[str, str]:
    return {
        name: connection.execute(text(f"SHOW {name}")).scalar_one()
        for name in (*LIMITS, "TimeZone")
    }


async def test_every_process_connects_within_limits(database_url: str) -> None:
    expected = dict(zip(LIMITS, ("15s", "5s", "15s"), strict=True)) | {"TimeZone": "UTC"}
    engine = connect(database_url, "test")
    with engine.connect() as connection:
        assert limits_of(connection) == expected
    engine.dispose()
    async_engine = connect_async(database_url, "test")
    async with async_engine.connect() as async_connection:
        assert await async_connection.run_sync(limits_of) == expected
    await async_engine.dispose()


def test_nobody_connects_in_another_way() -> None:
    """Engines are made in two files, which set the limits; psycopg itself is used by neither."""
    makers = set()
    for package in ("api", "control", "workers", "cli", "migrations"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                if name.rpartition(".")[2] in CONNECTING or name == "psycopg.connect":
                    makers.add(str(path.relative_to(ROOT)))
    assert makers == {"control/database/connection.py", "control/database/migrate.py"}


@pytest.fixture
def hasty(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The same connections with limits of parts of a second."""
    hastily = " ".join(f"-c {name}={ms}" for name, ms in zip(LIMITS, (300, 100, 100), strict=True))
    monkeypatch.setattr(connections, "SESSION_LIMITS", hastily)
    engine = connect(database_url, "test")
    yield engine
    engine.dispose()


@pytest.fixture
def patient(database_url: str) -> Iterator[Engine]:
    """Connections without limits."""
    engine = create_engine(driver_url(database_url))
    yield engine
    engine.dispose()


def test_a_statement_that_takes_too_long_is_cancelled(hasty: Engine) -> None:
    with hasty.connect() as connection:
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("SELECT pg_sleep(30)"))
        assert isinstance(caught.value.orig, QueryCanceled)


def test_a_lock_that_is_not_to_be_had_is_not_waited_for(hasty: Engine, patient: Engine) -> None:
    with patient.begin() as held, hasty.connect() as connection:
        held.execute(text("LOCK TABLE quotas"))
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("SELECT * FROM quotas"))
        assert isinstance(caught.value.orig, LockNotAvailable)


def test_a_session_that_idles_in_a_transaction_is_ended(hasty: Engine, patient: Engine) -> None:
    here = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    watching = patient.execution_options(isolation_level="AUTOCOMMIT")
    with hasty.connect() as connection, watching.connect() as watcher:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        until(lambda: watcher.execute(here, {"pid": pid}).scalar_one() == 0)
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1"))
        connection.invalidate()


def test_a_migration_gives_way_to_those_who_work_and_comes_back(
    fresh_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody reads what it wants to change, it waits a little, and lets others by."""
    migrate.downgrade(fresh_database_url, "0003")
    hasty = migrate.MIGRATOR_LIMITS.replace("lock_timeout=1000", "lock_timeout=100")
    monkeypatch.setattr(migrate, "MIGRATOR_LIMITS", hasty)
    reader = create_engine(driver_url(fresh_database_url))
    reading = reader.connect()
    reading.execute(text("SELECT count(*) FROM api_keys"))
    pauses = []

    def end_reading(seconds: float) -> None:
        pauses.append(seconds)
        with reader.connect() as another:
            assert another.execute(text("SELECT count(*) FROM tenants")).scalar_one() == 0
        reading.close()

    migrate.upgrade(fresh_database_url, sleep=end_reading)
    assert pauses == [migrate.PAUSE_S]
    with reader.connect() as connection:
        connection.execute(text("SELECT expires_at FROM api_keys"))
    reader.dispose()


def test_a_migration_does_not_try_for_ever(
    fresh_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "MAX_TRIES", 2)
    migrate.downgrade(fresh_database_url, "0003")
    hasty = migrate.MIGRATOR_LIMITS.replace("lock_timeout=1000", "lock_timeout=100")
    monkeypatch.setattr(migrate, "MIGRATOR_LIMITS", hasty)
    reader = create_engine(driver_url(fresh_database_url))
    sleep: Callable[[float], None] = lambda seconds: None  # noqa: E731
    with reader.connect() as reading:
        reading.execute(text("SELECT count(*) FROM api_keys"))
        with pytest.raises(DBAPIError) as caught:
            migrate.upgrade(fresh_database_url, sleep=sleep)
        assert isinstance(caught.value.orig, LockNotAvailable)
    migrate.upgrade(fresh_database_url)
    reader.dispose()
