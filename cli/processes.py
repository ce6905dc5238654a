"""The service's own processes as children: their commands, order and signs of readiness.

The order is that of need: a replica needs a dispatcher to be given work, the gateway is ready
only when somebody can serve. Draining in reverse lets the gateway's streams end on a replica
that still computes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

import redis
import redis.exceptions

from cli.child import ChildSpec, always_ready
from cli.listening_address import ListeningAddress
from control.routing.snapshot_store import read_snapshots
from control.streams.keys import ModelKeys

_PROBE_TIMEOUT_S = 2.0
_MODEL_LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas of which model, behind a gateway at which address."""

    model: str
    num_replicas: int
    address: ListeningAddress


def process_specs(environment: Mapping[str, str], redis_url: str, fleet: Fleet) -> list[ChildSpec]:
    """Every process of the service, first to be started first.

    `environment` tells each where the servers and folders are, and what it serves.
    """
    replicas = [
        ChildSpec(
            name=f"replica-{number}",
            argv=headrace("replica"),
            environment=environment,
            is_ready=_replicas_accept(redis_url, fleet.model, number),
            start_timeout_s=_MODEL_LOAD_TIMEOUT_S,
            grace_s=30.0,
        )
        for number in range(1, fleet.num_replicas + 1)
    ]
    return [
        ChildSpec("dispatcher", headrace("dispatcher"), environment),
        *replicas,
        ChildSpec(
            name="gateway",
            argv=headrace("gateway"),
            environment=environment,
            is_ready=_gateway_is_ready(fleet.address),
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


def _gateway_is_ready(address: ListeningAddress) -> Callable[[], Awaitable[bool]]:
    def is_ready() -> bool:
        connection = HTTPConnection(address.reachable_host, address.port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    return partial(asyncio.to_thread, is_ready)


def _replicas_accept(redis_url: str, model: str, least: int) -> Callable[[], Awaitable[bool]]:
    def is_ready() -> bool:
        try:
            with redis.Redis.from_url(redis_url, socket_timeout=_PROBE_TIMEOUT_S) as client:
                living, _ = read_snapshots(client, ModelKeys(model))
        except redis.exceptions.RedisError:
            return False
        return sum(snapshot.is_accepting for snapshot in living.values()) >= least

    return partial(asyncio.to_thread, is_ready)
