"""A served model, keys, and a live gateway for the tests of the front door."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import httpx
import openai
import pytest
import redis
from sqlalchemy import Engine, text

from api.settings import GatewaySettings
from control.database.connection import connect as connect_database
from control.identity.keys import create_key
from control.identity.tenants import create_tenant
from control.registry.manifest import verify_manifest
from control.registry.model_version import ModelVersion
from control.registry.store import register_version
from control.streams.connection import connect as connect_redis
from control.streams.keys import ModelKeys
from tests.api.admin_client import Admin
from tests.api.live_gateway import PEPPER, LiveGateway, gateway_settings, live_gateway
from tests.api.scripted_replica import ScriptedReplica, hello
from workers.scripted_model import make_scripted_model

MAX_MODEL_LEN = 256
MAX_OUTPUT = 64


@dataclass(slots=True)
class Served:
    """What the tests know of what is served."""

    version: ModelVersion
    tenant_id: str
    key: str
    database: Engine
    client: redis.Redis
    replica: ScriptedReplica

    @property
    def model(self) -> str:
        """The name to ask for."""
        return self.version.model

    def new_key(self, *scopes: str, tenant: str | None = None) -> tuple[str, str]:
        """A new key of this tenant, or of a new one of that name: its id, and itself."""
        with self.database.begin() as connection:
            owner = self.tenant_id
            if tenant is not None:
                owner = create_tenant(connection, tenant).tenant_id
            record, key = create_key(connection, PEPPER, owner, frozenset(scopes))
        return record.key_id, key

    def register(self, suffix: str) -> str:
        """Another name for the same weights, served a moment ago and by nobody now."""
        name = f"{self.model}-{suffix}"
        with self.database.begin() as connection:
            register_version(connection, replace(self.version, model=name))
        self.client.set(ModelKeys(name).serving(self.version.weights_digest), b"1")
        return name

    def count_rows(self, model: str) -> int:
        """How many requests for the model the ledger knows."""
        with self.database.connect() as connection:
            count: int = connection.execute(
                text("SELECT count(*) FROM requests WHERE model = :model"), {"model": model}
            ).scalar_one()
            return count


@pytest.fixture(scope="package")
def served(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The scripted model under a name of its own, and somebody to serve it."""
    folder = make_scripted_model(tmp_path_factory.mktemp("weights"))
    name = f"front-door-{secrets.token_hex(4)}"
    version = ModelVersion(
        model=name,
        version="v1",
        weights_digest=verify_manifest(folder),
        weights_folder=str(folder),
        max_model_len=MAX_MODEL_LEN,
        max_output_tokens=MAX_OUTPUT,
        created_at=datetime.now(UTC),
        is_in_force=True,
    )
    database, client = connect_database(database_url, "test"), connect_redis(redis_url)
    with database.begin() as connection:
        register_version(connection, version)
        tenant_id = create_tenant(connection, name).tenant_id
        _, key = create_key(connection, PEPPER, tenant_id, frozenset({"inference"}))
    replica = ScriptedReplica(client, database, name, version.weights_digest)
    replica.start()
    yield Served(version, tenant_id, key, database, client, replica)
    replica.stop()
    client.close()
    database.dispose()


@pytest.fixture
def replica(served: Served) -> Iterator[ScriptedReplica]:
    """The replica, saying hello until the test gives it another script."""
    served.replica.forget()
    served.replica.script = hello
    yield served.replica
    for run in list(served.replica.runs.values()):
        run.cancelled.set()
        assert run.ended.wait(10)
    served.replica.script = hello


@pytest.fixture(scope="package")
def settings(served: Served, database_url: str, redis_url: str) -> GatewaySettings:
    """The settings of the shared gateway."""
    del served
    return gateway_settings(database_url, redis_url)


@pytest.fixture(scope="package")
def live(settings: GatewaySettings) -> Iterator[LiveGateway]:
    """One gateway for all tests that do not hurt it."""
    with live_gateway(settings) as gateway:
        yield gateway


@pytest.fixture
def start_gateway(
    served: Served, database_url: str, redis_url: str
) -> Iterator[Callable[..., LiveGateway]]:
    """Starts gateways with other settings; they end with the test."""
    del served
    with ExitStack() as stack:

        def start(**fields: object) -> LiveGateway:
            settings = gateway_settings(database_url, redis_url, **fields)
            return stack.enter_context(live_gateway(settings))

        yield start


@pytest.fixture(scope="package")
def http(live: LiveGateway, served: Served) -> Iterator[httpx.Client]:
    """A client with a key."""
    headers = {"authorization": f"Bearer {served.key}"}
    base = f"http://127.0.0.1:{live.port}"
    with httpx.Client(base_url=base, headers=headers, timeout=30) as client:
        yield client


@pytest.fixture(scope="package")
def sdk(live: LiveGateway, served: Served) -> Iterator[openai.OpenAI]:
    """The official client, without retries of its own."""
    with openai.OpenAI(base_url=live.url, api_key=served.key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def operator(live: LiveGateway, served: Served) -> Iterator[Admin]:
    """The administrator of every tenant."""
    admin = Admin(live, served.database, is_operator=True, scopes="admin")
    with admin.client:
        yield admin


@pytest.fixture
def customer(live: LiveGateway, served: Served) -> Iterator[Admin]:
    """The administrator of one tenant, with every scope."""
    admin = Admin(live, served.database, is_operator=False, scopes="admin inference batch usage")
    with admin.client:
        yield admin
