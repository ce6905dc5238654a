"""Brings the schema to a revision. Any number of starters may call at once: one runs.

The lock is a session lock, not a transaction lock, so that a migration may create an index
concurrently while the others wait outside it.

A migration that waits for a table's lock makes everybody behind it wait, too. So it waits for a
second at most, gives way, and tries again: the service goes on meanwhile. What a migration has
committed stays done.
"""

import time
from collections.abc import Callable

from alembic import command
from alembic.config import Config
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, create_engine, pool, text
from sqlalchemy.exc import OperationalError

from control.database.connection import CONNECT_TIMEOUT_S, driver_url

MIGRATION_LOCK = 0x4865616472616365  # "Headrace" in ASCII

# An index takes as long as it takes; for its turn, a starter waits as long as the others need.
MIGRATOR_LIMITS = (
    "-c statement_timeout=0 -c lock_timeout=1000 "
    "-c idle_in_transaction_session_timeout=60000 -c timezone=UTC"
)
WAITER_LIMITS = (
    "-c statement_timeout=0 -c lock_timeout=0 "
    "-c idle_in_transaction_session_timeout=60000 -c timezone=UTC"
)
MAX_TRIES = 30
PAUSE_S = 1.0


def upgrade(
    database_url: str, revision: str = "head", sleep: Callable[[float], None] = time.sleep
) -> None:
    """Apply every migration up to `revision`. Raises OperationalError if a table stays locked."""
    _run(database_url, lambda config: command.upgrade(config, revision), sleep)


def downgrade(database_url: str, revision: str) -> None:
    """Undo migrations down to `revision` ("base" for all)."""
    _run(database_url, lambda config: command.downgrade(config, revision), time.sleep)


def _run(database_url: str, run: Callable[[Config], None], sleep: Callable[[float], None]) -> None:
    waiter, migrator = _engine(database_url, WAITER_LIMITS), _engine(database_url, MIGRATOR_LIMITS)
    config = Config()
    config.set_main_option("script_location", "migrations:")
    with waiter.connect() as lock_holder:
        lock_holder.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": MIGRATION_LOCK})
        lock_holder.commit()
        try:
            with migrator.connect() as connection:
                _migrate(connection, config, run, sleep)
        finally:
            lock_holder.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": MIGRATION_LOCK})
            lock_holder.commit()
    waiter.dispose()
    migrator.dispose()


def _engine(database_url: str, limits: str) -> Engine:
    return create_engine(
        driver_url(database_url),
        poolclass=pool.NullPool,
        hide_parameters=True,
        connect_args={
            "options": limits,
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": "headrace migrate",
        },
    )


def _migrate(
    connection: Connection,
    config: Config,
    run: Callable[[Config], None],
    sleep: Callable[[float], None],
) -> None:
    config.attributes["connection"] = connection
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            run(config)
            connection.commit()
            return
        except OperationalError as error:
            connection.rollback()
            if not isinstance(error.orig, LockNotAvailable) or not tries_left:
                raise
            sleep(PAUSE_S)
