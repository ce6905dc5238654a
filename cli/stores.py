"""Says in words what keeps a command from its servers; no traceback, no password."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from cli.errors import CommandFailed
from control.database.failure import in_words
from control.streams.connection import UnsafeServer


class StoreUnusable(CommandFailed):
    """A server that a command needs is away, or not as it must be."""


@contextmanager
def failures_in_words() -> Iterator[None]:
    """Around everything that speaks to PostgreSQL or Redis. Raises StoreUnusable."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = f"The database at DATABASE_URL cannot be asked: {in_words(error)}"
        raise StoreUnusable(reason) from error
    except UnsafeServer as error:
        raise StoreUnusable(str(error)) from error
    except RedisError as error:
        raise StoreUnusable(f"The server at REDIS_URL cannot be asked: {error}") from error
