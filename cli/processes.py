"""The service's own processes as children: their commands, order and signs of readiness.

The order is that of need: a replica needs a dispatcher to be given work, the gateway is ready
only when somebody can serve. Draining in reverse lets the gateway's streams end on a replica
that still computes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

import httpx
import redis
import redis.exceptions

from cli.child import ChildSpec, always_ready
from cli.settings import Servers, child_environment
from control.routing.snapshot_store import read_snapshots
from control.streams.keys import ModelKeys

_PROBE_TIMEOUT_S = 2.0
_MODEL_LOAD_TIMEOUT_S = 600.0


def process_specs(
    servers: Servers, service: Mapping[str, str], origin: str, num_replicas: int
) -> list[ChildSpec]:
    """Every process of the service, first to be started first.

    `service` names the model, folders and address to each; `origin` is where the gateway answers.
    """
    environment = child_environment(servers, service)
    model = service["HEADRACE_MODEL"]
    names = [f"replica-{number}" for number in range(1, num_replicas + 1)]
    replicas = [
        ChildSpec(
            name=name,
            argv=headrace("replica"),
            environment=environment | {"HEADRACE_REPLICA_NAME": name},
            is_ready=_replica_reports(servers.redis_url, model, name),
            start_timeout_s=_MODEL_LOAD_TIMEOUT_S,
            grace_s=30.0,
        )
        for name in names
    ]
    return [
        ChildSpec("dispatcher", headrace("dispatcher"), environment),
        *replicas,
        ChildSpec(
            name="gateway",
            argv=headrace("gateway"),
            environment=environment,
            is_ready=_answers(f"{origin}/health/ready"),
            grace_s=30.0,
        ),
        ChildSpec("batch-worker", headrace("batch-worker"), environment, always_ready),
        ChildSpec("maintenance", headrace("maintenance"), environment, always_ready),
    ]


def headrace(*arguments: str) -> tuple[str, ...]:
    """The command line of one of our own commands, in this interpreter.

    -P: whatever lies in the folder we were started in is not imported in place of our packages.
    """
    return (sys.executable, "-P", "-m", "cli.main", *arguments)


def _answers(url: str) -> Callable[[], Awaitable[bool]]:
    async def is_ready() -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return is_ready


def _replica_reports(redis_url: str, model: str, name: str) -> Callable[[], Awaitable[bool]]:
    def is_accepting() -> bool:
        try:
            with redis.Redis.from_url(redis_url, socket_timeout=_PROBE_TIMEOUT_S) as client:
                living, _ = read_snapshots(client, ModelKeys(model))
        except redis.exceptions.RedisError:
            return False
        # Each life of a replica has an id of its own, which begins with the replica's name.
        return any(s.is_accepting for i, s in living.items() if i.startswith(f"{name}-"))

    async def is_ready() -> bool:
        return await asyncio.to_thread(is_accepting)

    return is_ready
