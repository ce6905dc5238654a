"""What the command line reads from the environment, and what it tells its children there.

The variables in `service_environment` are the interface between `headrace serve` (or compose,
systemd, Kubernetes) and the processes; each process reads them in settings of its own. Secrets
come this way or in a file, never as an argument.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from cli.errors import CommandFailed
from control.identity.keys import MIN_PEPPER_BYTES
from control.server_urls import check_broker_url, check_database_url, check_redis_url

SERVERS_FILE = "serve.env"
DATABASE_URL = "DATABASE_URL"
REDIS_URL = "REDIS_URL"
BROKER_URL = "CELERY_BROKER_URL"
KEY_PEPPER = "HEADRACE_KEY_PEPPER"
WEIGHT_STORE = "HEADRACE_WEIGHT_STORE"
CLUSTER_HOME = "HEADRACE_CLUSTER_HOME"
TEST_BUILD = "HEADRACE_TEST_BUILD"
BASE_URL = "HEADRACE_BASE_URL"
API_KEY = "HEADRACE_API_KEY"
ADMIN_KEY = "HEADRACE_ADMIN_KEY"

_PREFIX = "HEADRACE_"
_OF_CLIENTS = {BASE_URL, API_KEY, ADMIN_KEY}


class SettingMissing(CommandFailed):
    """A variable that a command needs is absent or unusable."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `headrace serve` takes from the environment; all of it may be absent."""

    database_url: str | None = field(repr=False)
    redis_url: str | None = field(repr=False)
    broker_url: str | None = field(repr=False)
    key_pepper: str | None = field(repr=False)
    weight_store: Path | None
    cluster_home: Path
    is_test_build: bool

    @classmethod
    def from_environment(cls) -> "ServeSettings":
        """Read each variable once; an empty one counts as not set. Raises SettingMissing."""
        given = {name: value for name, value in _environment().items() if value}
        for name, value in given.items():
            check(name, value)
        return cls(
            database_url=given.get(DATABASE_URL),
            redis_url=given.get(REDIS_URL),
            broker_url=given.get(BROKER_URL),
            key_pepper=given.get(KEY_PEPPER),
            weight_store=Path(given[WEIGHT_STORE]).absolute() if WEIGHT_STORE in given else None,
            cluster_home=Path(given.get(CLUSTER_HOME, "/var/lib/headrace")),
            is_test_build=given.get(TEST_BUILD) == "1",
        )


@dataclass(frozen=True, slots=True)
class Servers:
    """How to reach what the service stands on. Each may hold a password: never print one."""

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    broker_url: str = field(repr=False)
    key_pepper: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        return {
            DATABASE_URL: self.database_url,
            REDIS_URL: self.redis_url,
            BROKER_URL: self.broker_url,
            KEY_PEPPER: self.key_pepper,
        }


def service_environment(servers: Servers, service: Mapping[str, str]) -> dict[str, str]:
    """All that makes a process one of this service: our own HEADRACE_ settings, the servers, and
    what `service` says. What a client needs is not part of it.
    """
    ours = {
        name: value
        for name, value in _environment().items()
        if name.startswith(_PREFIX) and name not in _OF_CLIENTS
    }
    return ours | servers.environment() | dict(service)


def child_environment(service: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a child: ours (for PATH and the like) and the service's."""
    return _environment() | dict(service)


def broker_beside(redis_url: str) -> str:
    """Celery's broker when only the Redis server is named: its database 1."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"redis+socket://{parts.path}?virtual_host=1"
    return urlunsplit(parts._replace(path="/1"))


def given(name: str) -> str | None:
    """A variable of the environment; None if it is not set or empty. Raises SettingMissing."""
    value = _environment().get(name)
    return check(name, value) if value else None


def check(name: str, value: str) -> str:
    """The value, if it can be one of that variable. Raises SettingMissing, without the value."""
    try:
        return _CHECKS[name](value) if name in _CHECKS else value
    except ValueError as error:
        raise SettingMissing(f"{name}: {error}") from None


def pepper_bytes(key_pepper: str) -> bytes:
    """The pepper itself. Raises SettingMissing, without its value, if it is none."""
    return bytes.fromhex(check(KEY_PEPPER, key_pepper))


def _check_pepper(key_pepper: str) -> str:
    try:
        pepper = bytes.fromhex(key_pepper)
    except ValueError:
        pepper = b""
    if len(pepper) < MIN_PEPPER_BYTES:
        raise ValueError(
            f"it must hold {MIN_PEPPER_BYTES} bytes or more in hexadecimal "
            "(openssl rand -hex 32 makes them)"
        )
    return key_pepper


_CHECKS: dict[str, Callable[[str], str]] = {
    DATABASE_URL: check_database_url,
    REDIS_URL: check_redis_url,
    BROKER_URL: check_broker_url,
    KEY_PEPPER: _check_pepper,
}


def _environment() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251 - this is the settings file of the command line
