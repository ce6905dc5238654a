"""What the command line reads from the environment, and what it tells its children there.

The variables in `Servers.environment` and `child_environment` are the interface between
`headrace serve` (or compose, systemd, Kubernetes) and the processes; each process reads them in
settings of its own. Secrets come this way or in a file, never as an argument.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from cli.env_file import read_env_file
from cli.errors import CommandFailed
from control.identity.keys import MIN_PEPPER_BYTES

SERVERS_FILE = "serve.env"
DATABASE_URL = "DATABASE_URL"
REDIS_URL = "REDIS_URL"
BROKER_URL = "CELERY_BROKER_URL"
KEY_PEPPER = "HEADRACE_KEY_PEPPER"
WEIGHT_STORE = "HEADRACE_WEIGHT_STORE"
CLUSTER_HOME = "HEADRACE_CLUSTER_HOME"
TEST_BUILD = "HEADRACE_TEST_BUILD"


class SettingMissing(CommandFailed):
    """A variable that a command needs is absent or unusable."""


def default_data_dir() -> Path:
    """Where a person's own data lies when no folder is named."""
    return Path.home() / ".local" / "share" / "headrace"


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
        """Read each variable once; an empty one counts as not set."""
        given = {name: value for name, value in _environment().items() if value}
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


def child_environment(servers: Servers, service: Mapping[str, str]) -> dict[str, str]:
    """Our own environment, the servers, and what `service` says about this service."""
    return _environment() | servers.environment() | dict(service)


def broker_beside(redis_url: str) -> str:
    """Celery's broker when only the Redis server is named: its database 1."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"redis+socket://{parts.path}?virtual_host=1"
    return urlunsplit(parts._replace(path="/1"))


def pepper_bytes(key_pepper: str) -> bytes:
    """The pepper itself. Raises SettingMissing, without its value, if it is none."""
    try:
        pepper = bytes.fromhex(key_pepper)
    except ValueError:
        pepper = b""
    if len(pepper) < MIN_PEPPER_BYTES:
        raise SettingMissing(
            f"{KEY_PEPPER} must hold {MIN_PEPPER_BYTES} bytes or more in hexadecimal "
            "(openssl rand -hex 32 makes them)."
        )
    return pepper


def setting(name: str, data_dir: Path) -> str:
    """A variable: from the environment, else from what a serve on this data folder wrote.

    Raises SettingMissing.
    """
    value = _environment().get(name) or read_env_file(data_dir / SERVERS_FILE).get(name)
    if not value:
        raise SettingMissing(
            f"{name} is not set, and no `headrace serve` has run on {data_dir}. "
            f"Set {name}, or name the folder with --data-dir."
        )
    return value


def _environment() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251 - this is the settings file of the command line
