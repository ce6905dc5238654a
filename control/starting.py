"""What every process does before it starts: it reads its settings and looks at its servers.

What keeps it from starting is said in the same words by all of them, one line for each thing,
and the process ends with status 1. Variables are named; what they hold is never shown.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from control.database.failure import in_words
from control.faults import UnknownFault
from control.streams.connection import UnsafeServer, check_server, connect

Settings = TypeVar("Settings", bound=BaseSettings)


class BadSettings(Exception):
    """The environment lacks something or holds something unusable; one line for each."""


@contextmanager
def refusing_to_start(process: str) -> Iterator[None]:
    """Around a process's first steps: say in words why it does not start, and exit with 1."""
    try:
        yield
    except (BadSettings, UnknownFault, UnsafeServer) as error:
        reason = str(error)
    except SQLAlchemyError as error:
        reason = f"The database at DATABASE_URL cannot be asked: {in_words(error)}"
    else:
        return
    sys.exit(f"The {process} does not start.\n{reason}")


def read_settings(settings: type[Settings]) -> Settings:
    """Read the environment. Raises BadSettings, which names variables but never their values."""
    try:
        return settings()
    except ValidationError as error:
        prefix = settings.model_config.get("env_prefix", "")
        lines = []
        for detail in error.errors(include_input=False, include_url=False):
            name = str(detail["loc"][0])
            variable = name if name.isupper() else (prefix + name).upper()
            lines.append(f"{variable}: {detail['msg'].removeprefix('Value error, ')}")
        raise BadSettings("\n".join(lines)) from None


def check_redis(redis_url: str) -> None:
    """Raise UnsafeServer if the server is away, or could lose or leak requests."""
    with connect(redis_url) as client:
        try:
            check_server(redis_url, client)
        except RedisError as error:
            raise UnsafeServer(f"The server at REDIS_URL cannot be asked: {error}") from error
