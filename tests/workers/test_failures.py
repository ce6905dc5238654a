"""What happens when a part of the service goes away: nothing is lost, doubled or left open."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from control.database.connection import connect as connect_database
from control.metering.expiry import Expiry
from control.metering.settlement import Claim, begin_attempt
from control.protocol.answer_form import AnswerForm, pack_form
from control.streams.functions import invoke, seize
from tests.servers import Servers
from tests.workers.service import Service, until


@pytest.fixture
def service(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service without a dispatcher."""
    service = Service(database_url, redis_url, tmp_path)
    yield service
    service.close()


def forget(service: Service) -> None:
    """Take from Redis all that it knows of the service's model, as a flush would."""
    for key in service.client.scan_iter(match=f"{{{service.model}}}:*", count=1000):
        service.client.delete(key)


async def test_a_standby_takes_the_lead_and_what_is_waiting(service: Service) -> None:
    first = service.start_dispatcher()
    until(lambda: bool(service.client.exists(service.keys.leader)))
    leader = service.client.get(service.keys.leader)
    service.start_dispatcher()
    async with service.caller() as caller:
        request = service.request(b"waits for a leader and a replica")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        first.set()
        await asyncio.to_thread(
            until, lambda: service.client.get(service.keys.leader) not in (None, leader)
        )
        service.start_replica()
        answer = await asking
    assert answer.text == "waits for a leader and a replica"


async def test_requests_that_redis_forgot_end_and_are_settled_from_memory(
    service: Service,
) -> None:
    service.start_dispatcher()
    service.start_replica(delay_ms=30)
    async with service.caller() as caller:
        request = service.request(b"x" * 200, max_tokens=200)
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 3)
        forget(service)
        answer = await asking
        assert answer.last.error == "request_lost"
        again = await caller.ask(service.request(b"the service goes on"))
        assert again.text == "the service goes on"
    ((_, completion, _, outcome, error),) = service.usage(request.request_id)
    assert (outcome, error) == ("failed", "request_lost")
    assert completion == len(answer.token_ids)


async def test_endings_wait_for_postgresql(
    servers: Servers, redis_url: str, tmp_path: Path
) -> None:
    service = Service(servers.new_database(), redis_url, tmp_path)
    service.start_dispatcher()
    service.start_replica(delay_ms=10)
    name = service.database.url.database
    admin = connect_database(servers.postgres.url, "test")
    try:
        async with service.caller() as caller:
            request = service.request(b"said while the ledger is away")
            asking = asyncio.create_task(caller.ask(request))
            await asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 3)
            with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = :name"
                    ),
                    {"name": name},
                )
                await asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 29)
                assert not asking.done()
                connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
            answer = await asking
        assert answer.text == "said while the ledger is away"
        assert answer.last.error is None
        assert len(service.usage(request.request_id)) == 1
    finally:
        service.close()
        admin.dispose()


async def test_a_dead_connection_costs_an_acceptance_a_second_try_and_no_error(
    servers: Servers, redis_url: str, tmp_path: Path
) -> None:
    service = Service(servers.new_database(), redis_url, tmp_path)
    service.start_dispatcher()
    service.start_replica()
    try:
        async with service.caller() as caller:
            await caller.ask(service.request(b"opens the pool"))
            with service.database.begin() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND application_name LIKE '%caller'"
                    )
                )
            answer = await caller.ask(service.request(b"goes through"))
        assert answer.text == "goes through"
    finally:
        service.close()


async def test_a_request_that_was_never_queued_expires_unbilled(service: Service) -> None:
    async with service.caller() as caller:
        lost, known = service.request(b"never queued"), service.request(b"queued")
        await caller.admission.accept(service.reservation(lost), lost)
        await caller.admission.accept(service.reservation(known), known)
    service.client.delete(service.keys.live(lost.request_id))
    now = iter([0.0, 59.0, 60.0])
    expiry = Expiry(least_age_s=0, monotonic=lambda: next(now))
    for expected in ("held", "held", "failed"):
        with service.database.begin() as connection:
            expiry.expire(connection, service.client)
        assert service.state(lost.request_id) == expected
    assert service.usage(lost.request_id) == [(0, 0, 0, "failed", "request_lost")]
    assert service.state(known.request_id) == "held"


async def test_an_ending_that_was_begun_by_a_dead_process_is_finished(service: Service) -> None:
    async with service.caller() as caller:
        request = service.request(b"half ended")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        invoke(service.client, seize(service.keys, request.request_id, "replica_lost"))
        service.start_dispatcher()
        answer = await asking
    assert answer.last.error == "replica_lost"
    assert service.usage(request.request_id) == [(0, 0, 0, "failed", "replica_lost")]


async def test_a_request_that_two_replicas_died_with_ends(service: Service) -> None:
    service.start_dispatcher()
    async with service.caller() as caller:
        request = service.request(b"poison")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        live = service.keys.live(request.request_id)
        # As if two replicas had taken it and gone silent, one after the other.
        service.client.hset(live, mapping={"replica": "dead", "failures": 1})
        answer = await asking
    assert answer.last.error == "replica_lost"
    assert service.state(request.request_id) == "failed"


async def test_a_request_whose_newest_moves_redis_lost_goes_on(service: Service) -> None:
    service.start_dispatcher()
    async with service.caller() as caller:
        request = service.request(b"said after all")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        # PostgreSQL has seen attempt 5; the Redis that failed over knows only of the first.
        with service.database.begin() as connection:
            assert begin_attempt(connection, request.request_id, 5) is Claim.OURS
        service.client.hset(service.keys.live(request.request_id), "attempt", 1)
        service.start_replica()
        answer = await asking
    assert answer.text == "said after all"
    assert len(service.usage(request.request_id)) == 1


async def test_a_request_whose_newest_moves_redis_lost_can_be_cancelled(service: Service) -> None:
    async with service.caller() as caller:
        request = service.request(b"not said")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        with service.database.begin() as connection:
            begin_attempt(connection, request.request_id, 5)
        await caller.follower.cancel(service.model, request.request_id)
        service.start_dispatcher()
        answer = await asking
    assert answer.last.error == "cancelled"
    assert service.state(request.request_id) == "cancelled"


async def test_a_request_that_no_row_knows_ends_unbilled(service: Service) -> None:
    service.start_dispatcher()
    async with service.caller() as caller:
        request = service.request(b"no row")
        asking = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: bool(service.client.smembers(service.keys.open)))
        with service.database.begin() as connection:
            connection.execute(
                text("DELETE FROM requests WHERE request_id = :id"), {"id": request.request_id}
            )
        service.client.hset(service.keys.live(request.request_id), "attempt", 1)
        service.start_replica()
        answer = await asking
    assert answer.last.error == "request_lost"
    assert service.usage(request.request_id) == []


async def test_a_request_that_was_left_with_a_grace_ends_with_it_without_its_gateway(
    service: Service,
) -> None:
    service.start_dispatcher()
    service.start_replica(delay_ms=20)
    request = service.request(b"x" * 250, max_tokens=250)
    async with service.caller() as caller:
        assert await caller.admission.accept(service.reservation(request), request)
        until(lambda: service.num_deltas(request.request_id) > 0)
        assert await caller.follower.leave(service.model, request.request_id, grace_s=1)
    until(lambda: service.state(request.request_id) == "cancelled", 15)
    ((_, completion_tokens, _, _, error),) = service.usage(request.request_id)
    assert error == "cancelled"
    # It went on for the grace, and not much longer: the dispatcher looks once a second.
    assert 40 < completion_tokens < 250


async def test_a_whole_answer_whose_gateway_died_is_on_no_invoice(service: Service) -> None:
    service.start_dispatcher()
    service.start_replica(delay_ms=100)
    whole, stream = (service.request(b"x" * 250, max_tokens=250) for _ in range(2))
    async with service.caller() as caller:
        for request, is_stream in ((whole, False), (stream, True)):
            form = pack_form(AnswerForm(is_chat=False, is_stream=is_stream))
            reservation = replace(service.reservation(request), answer_form=form)
            assert await caller.admission.accept(reservation, request)
    service.client.delete(f"follower:{caller.follower.follower_id}")
    until(lambda: service.state(whole.request_id) == "cancelled", 15)
    until(lambda: service.state(stream.request_id) == "cancelled", 15)
    with service.database.connect() as connection:
        found = connection.execute(
            text("SELECT request_id FROM undelivered_requests WHERE request_id = ANY(:ids)"),
            {"ids": [whole.request_id, stream.request_id]},
        ).scalars()
        assert list(found) == [whole.request_id]


async def test_a_server_that_lost_the_followers_leases_costs_nobody_his_request(
    service: Service,
) -> None:
    service.start_dispatcher()
    service.start_replica(delay_ms=20)
    async with service.caller() as caller:
        service.client.delete(f"follower:{caller.follower.follower_id}")
        answer = await caller.ask(service.request(b"x" * 150, max_tokens=200))
    assert answer.last.error is None
    assert answer.text == "x" * 150
