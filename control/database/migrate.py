"""Brings the schema to a revision. Any number of starters may call at once: one runs.

The lock is a session lock, not a transaction lock, so that a migration may create an index
concurrently while the others wait outside it.
"""

from collections.abc import Callable

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, pool, text

from control.database.connection import driver_url

MIGRATION_LOCK = 0x4865616472616365  # "Headrace" in ASCII


def upgrade(database_url: str, revision: str = "head") -> None:
    """Apply every migration up to `revision`."""
    _run(database_url, lambda config: command.upgrade(config, revision))


def downgrade(database_url: str, revision: str) -> None:
    """Undo migrations down to `revision` ("base" for all)."""
    _run(database_url, lambda config: command.downgrade(config, revision))


def _run(database_url: str, run: Callable[[Config], None]) -> None:
    engine = create_engine(driver_url(database_url), poolclass=pool.NullPool)
    config = Config()
    config.set_main_option("script_location", "migrations:")
    with engine.connect() as lock_holder:
        lock_holder.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": MIGRATION_LOCK})
        lock_holder.commit()
        try:
            with engine.connect() as connection:
                _migrate(connection, config, run)
        finally:
            lock_holder.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": MIGRATION_LOCK})
            lock_holder.commit()
    engine.dispose()


def _migrate(connection: Connection, config: Config, run: Callable[[Config], None]) -> None:
    config.attributes["connection"] = connection
    run(config)
    connection.commit()
