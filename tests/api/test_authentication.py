"""Keys over HTTP: what is no key, whose key it is, and what it may do."""

import asyncio
import secrets
import time
from collections.abc import Callable

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import event, text

from api.authentication import (
    FAILURES_PER_S,
    JOINT_LOOKUP_INTERVAL_S,
    MAX_FAILURES,
    Authenticator,
    Caller,
    FailureLimiter,
    source_of,
)
from api.key_uses import KeyUses
from control.database.connection import connect_async
from control.errors import (
    AuthenticationFailed,
    PermissionDenied,
    StoreUnavailable,
    TooManyFailures,
)
from control.identity.keys import KeyWish, create_key, get_key, revoke_key
from control.identity.tenants import set_suspended
from tests.api.conftest import Served
from tests.api.live_gateway import PEPPER, LiveGateway, gateway_settings
from tests.api.raw_http import exchange, request

NOWHERE = "postgresql://x@127.0.0.1:1/x"


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _scope(authorization: str, source: str = "10.0.0.1") -> dict[str, object]:
    return {"headers": [(b"authorization", authorization.encode())], "client": (source, 1)}


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Authorization: \r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: bearer KEY\r\n",
        b"Authorization: BEARER KEY\r\n",
        b"Authorization: KEY\r\n",
        b"Authorization: Basic KEY\r\n",
        b"Authorization: Bearer Bearer KEY\r\n",
        b"Authorization: Bearer  KEY\r\n",
        b"Authorization: Bearer KEY, Bearer KEY\r\n",
        b"Authorization: Bearer KEY\r\nAuthorization: Bearer KEY\r\n",
        b"Authorization: Bearer hr-\xff\xfe\r\n",
        b"Authorization: Bearer hr-' OR 1=1 --\r\n",
        b"Authorization: Bearer hr-" + b"x" * 20_000 + b"\r\n",
        b"x-api_key: KEY\r\n",
        b"x_authorization: Bearer KEY\r\n",
        b"Authorization_: Bearer KEY\r\n",
    ],
)
def test_what_is_not_exactly_one_bearer_key_is_refused(
    live: LiveGateway, served: Served, headers: bytes
) -> None:
    lines = headers.replace(b"KEY", served.key.encode())
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n"
    status, answer = exchange(live.port, head)
    assert status == 401, answer
    assert b'"type":"authentication_error"' in answer
    assert served.key.encode() not in answer


def test_a_megabyte_of_bearer_and_a_nul_are_refused_too(live: LiveGateway) -> None:
    for value, expected in (("hr-" + "x" * 1_000_000, 431), ("hr-\0", 400)):
        headers = {"Authorization": f"Bearer {value}"}
        status, _ = exchange(live.port, request("/v1/models", method="GET", headers=headers))
        assert status == expected


def test_malformed_keys_cost_no_query(live: LiveGateway) -> None:
    queries: list[str] = []
    engine = live.gateway.database.sync_engine

    def note(*arguments: object) -> None:
        queries.append(str(arguments[2]))

    event.listen(engine, "before_cursor_execute", note)
    try:
        for key in ("sk-123", "hr-" + "x" * 200, "hr-é", "hr"):
            headers = {b"authorization": f"Bearer {key}".encode()}
            answer = httpx.get(f"{live.url}/models", headers=headers)
            assert answer.status_code == 401
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert not [query for query in queries if "api_keys" in query]


def test_keys_that_begin_alike_are_different_keys(live: LiveGateway, served: Served) -> None:
    almost = served.key[:-1] + ("a" if served.key[-1] != "a" else "b")
    for _ in range(2):
        assert _models(live, served.key).status_code == 200
        assert _models(live, almost).status_code == 401


@pytest.mark.parametrize(
    ("scopes", "status"),
    [(("inference",), 200), (("inference", "batch"), 200), (("batch",), 403), (("admin",), 403)],
)
def test_a_key_may_do_what_its_scopes_say(
    live: LiveGateway, served: Served, scopes: tuple[str, ...], status: int
) -> None:
    _, key = served.new_key(*scopes)
    answer = _models(live, key)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["type"] == "permission_error"


async def test_a_key_is_remembered_for_seconds_and_no_longer(
    database_url: str, served: Served
) -> None:
    key_id, key = served.new_key("inference")
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    caller = await authenticator.authenticate(_scope(f"Bearer {key}"))
    assert (caller.tenant_id, caller.key_id) == (served.tenant_id, key_id)
    with served.database.begin() as connection:
        assert revoke_key(connection, key_id)
    clock.now += 3.9
    await authenticator.authenticate(_scope(f"Bearer {key}"))
    clock.now += 1.0
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    await database.dispose()


async def test_a_key_works_soon_after_it_was_made_though_it_was_tried_before(
    database_url: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    token = secrets.token_urlsafe(32)
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope(f"Bearer hr-{token}"))
    monkeypatch.setattr(secrets, "token_urlsafe", lambda _: token)
    with served.database.begin() as connection:
        _, key = create_key(connection, PEPPER, served.tenant_id, frozenset({"inference"}))
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    clock.now += 5
    await authenticator.authenticate(_scope(f"Bearer {key}"))
    await database.dispose()


async def test_a_source_of_many_unknown_keys_is_refused_without_queries(
    database_url: str, served: Served
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    queries: list[object] = []
    event.listen(
        database.sync_engine, "before_cursor_execute", lambda *arguments: queries.append(arguments)
    )
    refusals = {AuthenticationFailed: 0, TooManyFailures: 0}
    for number in range(1000):
        with pytest.raises((AuthenticationFailed, TooManyFailures)) as caught:
            await authenticator.authenticate(_scope(f"Bearer hr-{number}"))
        refusals[caught.type] += 1
    assert refusals == {AuthenticationFailed: MAX_FAILURES, TooManyFailures: 1000 - MAX_FAILURES}
    assert len(queries) == MAX_FAILURES + 1  # and the first joint one
    # A key that is known passes from there, and strangers from elsewhere are heard.
    await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope("Bearer hr-x", source="10.0.0.2"))
    clock.now += 1
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope("Bearer hr-y"))
    await database.dispose()


async def test_a_key_ends_by_the_databases_clock_and_not_by_ours(
    database_url: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host clocks an hour off change nothing: only a difference of times is taken from there."""
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    with served.database.begin() as connection:
        ends = connection.execute(text("SELECT now() + interval '3.9 seconds'")).scalar_one()
        _, key = create_key(
            connection, PEPPER, served.tenant_id, KeyWish(frozenset({"batch"}), expires_at=ends)
        )
    for skew_s in (-3600, 3600):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: 1e9 + skew_s)
        caller = await authenticator.authenticate(_scope(f"Bearer {key}"))
        assert caller.expires_at == ends
    # Remembered for what is left of it, not for the four seconds that others get.
    clock.now += 2
    monkeypatch.setattr(authenticator, "_database", connect_async(NOWHERE, "test"))
    await authenticator.authenticate(_scope(f"Bearer {key}"))
    clock.now += 1.9
    with pytest.raises(StoreUnavailable):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    with served.database.begin() as connection:
        connection.execute(
            text("UPDATE api_keys SET expires_at = now() WHERE key_id = :id"),
            {"id": caller.key_id},
        )
    monkeypatch.setattr(authenticator, "_database", database)
    with pytest.raises(AuthenticationFailed, match="expired"):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    await database.dispose()


async def test_a_suspended_tenants_keys_are_refused_within_seconds_and_taken_again(
    database_url: str, served: Served
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    _, key = served.new_key("inference", tenant=f"suspended-{secrets.token_hex(4)}")
    caller = await authenticator.authenticate(_scope(f"Bearer {key}"))
    for is_suspended in (True, False):
        with served.database.begin() as connection:
            set_suspended(connection, caller.tenant_id, is_suspended)
        clock.now += 5
        if is_suspended:
            with pytest.raises(PermissionDenied, match="suspended"):
                await authenticator.authenticate(_scope(f"Bearer {key}"))
        else:
            assert await authenticator.authenticate(_scope(f"Bearer {key}")) == caller
    await database.dispose()


async def test_when_a_key_was_last_used_is_written_once_for_many_requests(
    database_url: str, served: Served
) -> None:
    database = connect_async(database_url, "test")
    uses = KeyUses(database)
    authenticator = Authenticator(database, PEPPER, uses=uses)
    keys = [served.new_key("inference") for _ in range(3)]
    queries: list[str] = []
    event.listen(
        database.sync_engine,
        "before_cursor_execute",
        lambda *arguments: queries.append(str(arguments[2])),
    )
    for _ in range(100):
        for _, key in keys:
            await authenticator.authenticate(_scope(f"Bearer {key}"))
    assert not [query for query in queries if "UPDATE" in query]
    # A key that an administrator holds just now is left out, and holds nobody up.
    with served.database.begin() as connection:
        get_key(connection, keys[0][0], for_update=True)
        await uses.write()
    assert len([query for query in queries if "UPDATE" in query]) == 1
    with served.database.begin() as connection:
        used = [get_key(connection, key_id).last_used_at for key_id, _ in keys]
    assert [moment is None for moment in used] == [True, False, False]
    uses._database = connect_async(NOWHERE, "test")
    uses.note(keys[0][0])
    await uses.write()
    uses._database = database
    await uses.write()
    with served.database.begin() as connection:
        assert get_key(connection, keys[0][0]).last_used_at is not None
    await database.dispose()


@pytest.mark.parametrize(
    ("client", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
    ],
)
def test_all_addresses_of_one_host_are_one_source(client: str, source: str) -> None:
    assert source_of({"client": (client, 1)}) == source


async def test_many_addresses_cost_the_database_no_more_than_a_flat_number_of_queries(
    database_url: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.authentication.MAX_FAILURES_OF_ALL", 20)
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    queries: list[object] = []
    event.listen(
        database.sync_engine, "before_cursor_execute", lambda *arguments: queries.append(arguments)
    )
    for number in range(200):
        with pytest.raises((AuthenticationFailed, TooManyFailures)):
            await authenticator.authenticate(_scope("Bearer hr-x" + str(number), f"h{number}"))
    assert len(queries) == 20 + 1  # and the first joint one
    await authenticator.authenticate(_scope(f"Bearer {served.key}", "h0"))
    await database.dispose()


async def test_however_many_ask_at_once_with_one_key_it_is_looked_up_once(
    database_url: str, served: Served
) -> None:
    """Also when the first of them leaves, and when it fails for all."""
    database = connect_async(database_url, "test", pool_size=2)
    queries: list[object] = []
    event.listen(
        database.sync_engine, "before_cursor_execute", lambda *arguments: queries.append(arguments)
    )
    for key, outcome in ((served.key, Caller), ("hr-nobodys", AuthenticationFailed)):
        authenticator = Authenticator(database, PEPPER)
        queries.clear()
        asking = [
            asyncio.create_task(authenticator.authenticate(_scope(f"Bearer {key}")))
            for _ in range(100)
        ]
        await asyncio.sleep(0)
        asking[0].cancel()
        first, *others = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert {type(each) for each in others} == {outcome}
        assert len(queries) == 1
        assert authenticator._asking == {}
    authenticator = Authenticator(connect_async(NOWHERE, "test"), PEPPER)
    asking = [
        asyncio.create_task(authenticator.authenticate(_scope(f"Bearer {served.key}")))
        for _ in range(3)
    ]
    refused = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(each) for each in refused} == {StoreUnavailable}
    await database.dispose()


async def test_how_much_of_a_key_was_right_cannot_be_told_from_the_time(
    database_url: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two wrong keys, the one that begins as a valid one takes no longer: in how many of all
    pairs it does is a half, give or take what chance gives.
    """
    monkeypatch.setattr("api.authentication.FailureLimiter.wait_ms", lambda *_: 0)
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER)
    took_s: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(400):
        for begins_alike in (True, False):
            beginning = served.key[:-8] if begins_alike else "hr-" + secrets.token_urlsafe(26)
            wrong = _scope(f"Bearer {beginning}{secrets.token_hex(4)}")
            started = time.perf_counter()
            with pytest.raises(AuthenticationFailed):
                await authenticator.authenticate(wrong)
            took_s[begins_alike].append(time.perf_counter() - started)
    longer = sum(alike > other for alike in took_s[True] for other in took_s[False])
    assert 0.4 < longer / 400**2 < 0.6
    await database.dispose()


async def _fail_often(authenticator: Authenticator) -> None:
    """Use up what 10.0.0.1 may fail, and the joint look-up of this moment."""
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises((AuthenticationFailed, TooManyFailures)):
            await authenticator.authenticate(_scope(f"Bearer hr-{secrets.token_hex(16)}"))


async def test_a_key_that_was_valid_is_never_refused_for_its_neighbours_failures(
    database_url: str, served: Served
) -> None:
    key_id, key = served.new_key("inference")
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    await authenticator.authenticate(_scope(f"Bearer {key}"))
    for age_s in (5, 60, 24 * 3600):
        clock.now += age_s
        await _fail_often(authenticator)
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    with served.database.begin() as connection:
        assert revoke_key(connection, key_id)
    clock.now += 5
    await _fail_often(authenticator)
    with pytest.raises(AuthenticationFailed):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    with pytest.raises(TooManyFailures):
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    await database.dispose()


async def test_a_new_key_passes_on_its_second_try_whatever_its_neighbours_do(
    database_url: str, served: Served
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    keys = [served.new_key("inference")[1] for _ in range(3)]
    await _fail_often(authenticator)
    for key in keys:
        with pytest.raises(TooManyFailures) as caught:
            await authenticator.authenticate(_scope(f"Bearer {key}"))
    assert caught.value.retry_after_ms is not None
    clock.now += caught.value.retry_after_ms / 1000
    await _fail_often(authenticator)
    for key in keys:
        await authenticator.authenticate(_scope(f"Bearer {key}"))
    await database.dispose()


async def test_a_flood_of_unknown_keys_costs_a_flat_number_of_queries(
    database_url: str, served: Served
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    await _fail_often(authenticator)
    num_queries = 0

    def count(*arguments: object) -> None:
        nonlocal num_queries
        num_queries += 1

    event.listen(database.sync_engine, "before_cursor_execute", count)
    num_s, keys_per_s = 5, 400
    for number in range(num_s * keys_per_s):
        clock.now += 1 / keys_per_s
        with pytest.raises((AuthenticationFailed, TooManyFailures)):
            await authenticator.authenticate(_scope(f"Bearer hr-flood-{number}"))
    assert num_queries <= num_s * (FAILURES_PER_S + 1 / JOINT_LOOKUP_INTERVAL_S) + 1
    await database.dispose()


def test_a_source_is_the_peer_unless_a_trusted_proxy_names_another(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    def statuses(gateway: LiveGateway, forwarded: Callable[[int], str]) -> set[int]:
        with httpx.Client(timeout=30) as client:
            return {
                client.get(
                    f"{gateway.url}/models",
                    headers={
                        "authorization": f"Bearer hr-{secrets.token_hex(8)}",
                        "x-forwarded-for": forwarded(number),
                    },
                ).status_code
                for number in range(MAX_FAILURES + 60)
            }

    untrusting, trusting = start_gateway(), start_gateway(trusted_proxies="127.0.0.1")
    assert statuses(untrusting, lambda number: f"10.0.0.{number}") == {401, 429}
    assert statuses(trusting, lambda number: f"10.0.0.{number}") == {401}
    # What the client said itself comes before what the proxy says of it.
    assert statuses(trusting, lambda number: f"10.9.0.{number}, 10.0.1.1") == {401, 429}
    assert _models(trusting, served.key).status_code == 200


@pytest.mark.parametrize(
    "proxies", ["*", "0.0.0.0/0", "::/0", "10.0.0.1, *", "proxy", "10.0.0.1/8"]
)
def test_not_everybody_can_be_trusted_to_say_who_asks(proxies: str) -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        gateway_settings("postgresql://x/x", "redis://x", trusted_proxies=proxies)
    for fine in ("", "127.0.0.1", "10.0.0.0/8, 192.168.1.7,::1"):
        gateway_settings("postgresql://x/x", "redis://x", trusted_proxies=fine)


def test_the_wait_that_is_told_is_long_enough() -> None:
    clock = Clock()
    limiter = FailureLimiter(clock)
    for _ in range(MAX_FAILURES):
        assert limiter.wait_ms("a") == 0
        limiter.note("a")
    wait_ms = limiter.wait_ms("a")
    assert wait_ms >= 1000 * JOINT_LOOKUP_INTERVAL_S
    clock.now += wait_ms / 1000
    assert limiter.wait_ms("a") == 0


async def test_without_a_database_known_keys_pass_and_others_wait(
    database_url: str, served: Served
) -> None:
    clock = Clock()
    database = connect_async(database_url, "test")
    authenticator = Authenticator(database, PEPPER, clock)
    await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    authenticator._database = connect_async(NOWHERE, "test")
    await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    with pytest.raises(StoreUnavailable) as caught:
        await authenticator.authenticate(_scope("Bearer hr-' OR '1'='1"))
    assert caught.value.retry_after_ms == 1000
    clock.now += 5
    with pytest.raises(StoreUnavailable):
        await authenticator.authenticate(_scope(f"Bearer {served.key}"))
    await database.dispose()


def test_a_gateway_that_lost_its_database_says_503_and_no_more(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    gateway = start_gateway()
    away = connect_async("postgresql://secret@127.0.0.1:1/secret", "test")
    for part in (gateway.gateway.authenticator, gateway.gateway.admission):
        part._database = away
    answer = _models(gateway, served.key)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert answer.headers["retry-after"] == "1"
    assert "secret" not in answer.text
    assert "127.0.0.1" not in answer.text


def test_a_failed_acceptance_says_503(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    gateway = start_gateway()
    away = connect_async("postgresql://secret@127.0.0.1:1/secret", "test")
    gateway.gateway.admission._database = away
    headers = {"authorization": f"Bearer {served.key}"}
    body = {"model": served.model, "prompt": "x", "stream": True}
    answer = httpx.post(f"{gateway.url}/completions", json=body, headers=headers)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert "secret" not in answer.text


def _models(live: LiveGateway, key: str) -> httpx.Response:
    return httpx.get(f"{live.url}/models", headers={"authorization": f"Bearer {key}"}, timeout=30)
