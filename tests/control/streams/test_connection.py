"""A Redis that could lose or leak requests is refused at the start."""

from collections.abc import Iterator

import pytest
import redis

from control.streams.clock import SharedClock
from control.streams.connection import UnsafeServer, check_server, connect


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.config_set("maxmemory-policy", "noeviction")
    client.close()


def test_the_embedded_server_is_safe(redis_url: str, client: redis.Redis) -> None:
    check_server(redis_url, client)


def test_a_server_that_evicts_is_refused(redis_url: str, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeServer, match="noeviction"):
        check_server(redis_url, client)


@pytest.mark.parametrize("url", ["redis://10.0.0.1:6379/0", "redis://cache.example:6379"])
def test_an_open_port_elsewhere_is_refused(url: str, client: redis.Redis) -> None:
    with pytest.raises(UnsafeServer, match="password"):
        check_server(url, client)


@pytest.mark.parametrize(
    "url", ["rediss://cache.example:6379", "redis://:secret@cache.example", "redis://127.0.0.1"]
)
def test_a_protected_server_is_accepted(url: str, client: redis.Redis) -> None:
    check_server(url, client)


def test_the_shared_clock_follows_redis_and_not_the_host(client: redis.Redis) -> None:
    monotonic = iter([100.0, 100.0, 107.0, 1000.0])
    clock = SharedClock(monotonic=lambda: next(monotonic))
    clock.synchronize(client)
    now = clock.now()
    seconds, _ = client.time()
    assert abs(now - 7 - float(seconds)) < 5
    assert clock.now() - now == pytest.approx(893)
