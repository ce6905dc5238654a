"""Health tells load balancers the truth, cheaply."""

from collections.abc import Callable

import httpx
from sqlalchemy import event

from api.registry_view import RegistryView
from control.database.connection import connect_async
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import ScriptedReplica


def test_a_gateway_with_a_living_replica_is_ready(http: httpx.Client, served: Served) -> None:
    answer = http.get("/health/ready")
    assert answer.status_code == 200
    checks = {"database": "ok", "redis": "ok", "registry": "ok", "replica": "ok"}
    assert answer.json() == {"status": "ok", "checks": checks}


def test_readiness_asks_the_database_at_most_once_a_second(
    http: httpx.Client, live: LiveGateway
) -> None:
    queries: list[object] = []

    def note(*arguments: object) -> None:
        if arguments[2] == "SELECT 1":
            queries.append(arguments)

    engine = live.gateway.database.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    live.gateway.readiness._monotonic = lambda: 1e9
    try:
        for _ in range(20):
            http.get("/health/ready")
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert len(queries) == 1


def test_a_gateway_without_its_database_is_alive_but_not_ready(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    gateway = start_gateway()
    gateway.gateway.readiness._database = connect_async("postgresql://x@127.0.0.1:1/x", "test")
    base = f"http://127.0.0.1:{gateway.port}"
    answer = httpx.get(f"{base}/health/ready")
    assert answer.status_code == 503
    assert answer.json()["checks"]["database"] == "failing"
    assert answer.json()["checks"]["redis"] == "ok"
    assert httpx.get(f"{base}/health/live").status_code == 200


def test_a_model_that_nobody_serves_does_not_make_a_gateway_unready(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    served.register("lonely")
    assert http.get("/health/ready").status_code == 200


async def test_the_last_known_registry_outlives_the_database(
    database_url: str, served: Served
) -> None:
    now = 1000.0
    view = RegistryView(connect_async(database_url, "test"), lambda: now)
    known = await view.current()
    assert known.resolve(served.model) is not None
    await view._database.dispose()
    view._database = connect_async("postgresql://x@127.0.0.1:1/x", "test")
    now += 10
    assert await view.current() is known


async def test_a_new_rollout_is_seen_within_a_second(database_url: str, served: Served) -> None:
    now = 1000.0
    database = connect_async(database_url, "test")
    view = RegistryView(database, lambda: now)
    await view.current()
    name = served.register("rolled-out")
    now += 0.9
    assert (await view.current()).resolve(name) is None
    now += 0.2
    assert (await view.current()).resolve(name) is not None
    await database.dispose()
