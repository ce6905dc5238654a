"""How a process reaches PostgreSQL: one driver (psycopg), bounded pools, bounded statements.

Long transactions beside a queue slow every claim, so a session that sits idle in one is ended
by the server.
"""

from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

SESSION_LIMITS = (
    "-c statement_timeout=15000 -c lock_timeout=5000 "
    "-c idle_in_transaction_session_timeout=15000 -c timezone=UTC"
)
CONNECT_TIMEOUT_S = 5


def driver_url(database_url: str) -> str:
    """The given postgres URL with our driver named in it."""
    url = make_url(database_url).set(drivername="postgresql+psycopg")
    return url.render_as_string(hide_password=False)


def _connect_args(process: str) -> dict[str, str | int]:
    return {
        "options": SESSION_LIMITS,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "application_name": f"headrace {process}",
    }


def connect(database_url: str, process: str, pool_size: int = 4) -> Engine:
    """A synchronous engine for a worker or a command; `process` names it to the server."""
    return create_engine(
        driver_url(database_url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=5,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args=_connect_args(process),
    )


def connect_async(database_url: str, process: str, pool_size: int = 8) -> AsyncEngine:
    """An asynchronous engine for an event loop. Take a connection late, give it back early.

    Connections are not tried before use, which would cost a round trip each time: when one turns
    out to be dead the whole pool is renewed, and what matters is tried again by its caller.
    """
    return create_async_engine(
        driver_url(database_url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=5,
        hide_parameters=True,
        connect_args=_connect_args(process),
    )
