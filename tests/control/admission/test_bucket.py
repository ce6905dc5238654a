"""What a tenant may use: never more than its minute allows, and nothing that is held is lost."""

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import redis

from control.admission.bucket import (
    Allowance,
    Answer,
    Left,
    duration,
    headers,
    read_answer,
    refusal,
    release,
    renew,
    reserve,
)
from control.errors import QuotaExceeded, ReservationTooLarge
from control.streams.connection import connect
from control.streams.functions import invoke

FULL = Left(1_000, 100, 0)


class Tenant:
    """One tenant's buckets on the real server."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.tenant_id = f"tenant-{secrets.token_hex(4)}"
        self.allowance = Allowance("*", 1_000, 100, None)

    def reserve(self, request_id: str, num_tokens: int, left: Left | None = FULL) -> Answer:
        call = reserve(self.tenant_id, request_id, num_tokens, self.allowance, left)
        return read_answer(invoke(self.client, call))

    def release(self, request_id: str, num_used: int) -> int:
        released: int = invoke(self.client, release(self.tenant_id, request_id, num_used))
        return released

    def lapse(self) -> None:
        """Let every lease lapse, as time would."""
        name = f"{{{self.tenant_id}}}:leases"
        members = cast("list[bytes]", self.client.zrange(name, 0, -1))
        self.client.zadd(name, dict.fromkeys(members, 1))


@pytest.fixture
def tenant(redis_url: str) -> Iterator[Tenant]:
    client = connect(redis_url)
    yield Tenant(client)
    client.close()


def test_a_bucket_gives_what_is_in_it_and_says_how_long_the_rest_takes(tenant: Tenant) -> None:
    assert tenant.reserve("a", 700).left == Left(300, 99, 1)
    answer = tenant.reserve("b", 400)
    assert answer.lacking == "tokens"
    # 100 tokens are lacking, and 1,000 flow in within a minute.
    assert 5_000 < answer.wait_ms <= 6_000
    assert tenant.reserve("c", 300).lacking == ""


def test_what_was_not_used_comes_back_once(tenant: Tenant) -> None:
    tenant.reserve("a", 900)
    assert [tenant.release("a", 100), tenant.release("a", 0)] == [1, 0]
    answer = tenant.reserve("b", 900)
    assert answer.lacking == ""
    assert answer.left.num_open == 1


def test_the_same_request_is_reserved_once(tenant: Tenant) -> None:
    assert tenant.reserve("a", 600).left.tokens == 400
    again = tenant.reserve("a", 600)
    assert (again.lacking, again.left.tokens, again.left.num_open) == ("", 400, 1)


def test_a_server_that_has_forgotten_asks_what_the_ledger_says(tenant: Tenant) -> None:
    assert tenant.reserve("a", 100, left=None).is_forgotten
    assert tenant.reserve("a", 100, left=Left(250, 7, 0)).left == Left(150, 6, 1)
    assert tenant.reserve("b", 100, left=None).left.tokens == 50


def test_only_so_many_are_open_at_once_whatever_their_tokens(tenant: Tenant) -> None:
    tenant.allowance = Allowance("*", None, None, 2)
    assert [tenant.reserve(name, 10, None).lacking for name in "abc"] == ["", "", "concurrent"]
    tenant.release("a", 10)
    assert tenant.reserve("c", 10, None).lacking == ""


def test_what_the_dead_held_comes_back_when_their_leases_lapse(tenant: Tenant) -> None:
    tenant.allowance = Allowance("*", 1_000, 100, 2)
    tenant.reserve("a", 600)
    tenant.reserve("b", 300)
    assert tenant.reserve("c", 500).lacking == "concurrent"
    tenant.lapse()
    invoke(tenant.client, renew(tenant.tenant_id, ["b", "never seen"]))
    answer = tenant.reserve("c", 500)
    assert (answer.lacking, answer.left.num_open) == ("", 2)
    assert answer.left.tokens in (200, 201)


def test_models_have_buckets_of_their_own_and_places_in_common(tenant: Tenant) -> None:
    tenant.allowance = Allowance("small", 1_000, None, 2)
    assert tenant.reserve("a", 1_000).left.tokens == 0
    tenant.allowance = Allowance("large", 1_000, None, 2)
    assert tenant.reserve("b", 1_000).left.tokens == 0
    assert tenant.reserve("c", 1).lacking == "concurrent"


def test_a_limit_that_was_lowered_counts_at_once(tenant: Tenant) -> None:
    tenant.reserve("a", 100)
    tenant.allowance = Allowance("*", 200, 100, None)
    assert tenant.reserve("b", 201).lacking == "too_large"
    assert tenant.reserve("b", 200).left.tokens == 0


def test_two_hundred_callers_through_three_gateways_get_no_token_too_many(redis_url: str) -> None:
    """A full bucket, and what flows into it while they ask: no more, and hardly less."""
    clients = [connect(redis_url) for _ in range(3)]
    tenant = Tenant(clients[0])
    limit = 60_000
    tenant.allowance = Allowance("*", limit, None, None)
    tokens = 37
    granted = [0] * 200
    begun, stop = time.monotonic(), threading.Event()

    def ask(number: int) -> None:
        client = clients[number % 3]
        while not stop.is_set():
            request_id = f"{number}-{granted[number]}"
            call = reserve(
                tenant.tenant_id, request_id, tokens, tenant.allowance, Left(limit, None, 0)
            )
            if read_answer(invoke(client, call)).lacking:
                stop.wait(0.05)
            else:
                granted[number] += 1

    with ThreadPoolExecutor(200) as callers:
        asking = [callers.submit(ask, number) for number in range(200)]
        threading.Event().wait(2.0)
        stop.set()
        for asked in asking:
            asked.result()
    seconds = time.monotonic() - begun
    allowed = limit * (1 + seconds / 60)
    got = tokens * sum(granted)
    assert 0.95 * limit <= got <= allowed
    for client in clients:
        client.close()


def test_refusals_name_the_limit_and_the_wait() -> None:
    allowance = Allowance("*", 200_000, 60, 4)
    lacking_tokens = Answer("tokens", 120, Left(900, 3, 1))
    error = refusal(lacking_tokens, 1_300, allowance)
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_ms == 120
    assert str(error) == (
        "Limit 200000 tokens per minute, used 199100, requested 1300. Try again in 120 ms."
    )
    too_large = refusal(Answer("too_large", 0, Left(900, 3, 1)), 300_000, allowance)
    assert isinstance(too_large, ReservationTooLarge)
    assert "300000" in str(too_large)
    assert "200000" in str(too_large)
    assert refusal(Answer("", 0, Left(1, 1, 1)), 1, allowance) is None


def test_headers_say_what_is_left_and_when_all_of_it_is_back() -> None:
    told = headers(Allowance("*", 1_000, 60, 4), Left(250, 59, 1))
    assert told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "250",
        "x-ratelimit-reset-tokens": "45s",
        "x-ratelimit-limit-concurrent": "4",
        "x-ratelimit-remaining-concurrent": "3",
    }
    assert headers(Allowance("*"), Left(None, None, 1)) == {}


@pytest.mark.parametrize(
    ("milliseconds", "written"),
    [(0, "0ms"), (12, "12ms"), (999.6, "1s"), (1_500, "1.5s"), (60_000, "1m0s"), (360_000, "6m0s")],
)
def test_durations_are_written_as_go_writes_them(milliseconds: float, written: str) -> None:
    assert duration(milliseconds) == written
