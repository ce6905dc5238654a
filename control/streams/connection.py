"""How a process reaches Redis (or Valkey), and what it demands of the server.

Replies are kept in protocol 2 so that a stream read has one shape. Streams and live requests
must never be evicted, so another policy than noeviction is refused at the start, and so is an
open port without a password.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

import redis
import redis.asyncio

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0


class UnsafeServer(RuntimeError):
    """The Redis server is configured in a way that could lose or leak requests."""


def connect(url: str) -> redis.Redis:
    """A client for threads; each blocking read takes a connection of its own."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
    )


def connect_async(url: str, max_connections: int = 64) -> redis.asyncio.Redis:
    """A client for an event loop."""
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        max_connections=max_connections,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
    )


def check_server(url: str, client: redis.Redis) -> None:
    """Raise UnsafeServer if requests could be evicted or the port is open to anybody."""
    parts = urlsplit(url)
    if parts.scheme == "redis" and not parts.password and not _is_loopback(parts.hostname):
        raise UnsafeServer(
            f"REDIS_URL names {parts.hostname} without a password. Use a password and rediss://, "
            "or a private unix socket."
        )
    policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
    if policy != "noeviction":
        raise UnsafeServer(
            f"The Redis server evicts keys (maxmemory-policy is {policy}), which would lose "
            "accepted requests. Set maxmemory-policy to noeviction."
        )


def _is_loopback(host: str | None) -> bool:
    if host in (None, "localhost"):
        return True
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return False
