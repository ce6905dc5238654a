"""Produced = delivered + wasted = billed + wasted, whatever became of the requests."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from control.metering.dead_replicas import book_the_dead
from control.metering.ledger import compare, read_violations
from control.metering.settlement import WasteReason
from control.metering.unsettled import settle_late
from control.streams.functions import cancel, invoke
from tests.workers.service import Service, until


@pytest.fixture
def service(fresh_database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service with a dispatcher and a ledger of its own, of which every row must be right."""
    service = Service(fresh_database_url, redis_url, tmp_path)
    service.start_dispatcher()
    yield service
    service.close()


def wait_until_even(service: Service, num_requests: int) -> dict[WasteReason, int]:
    """Wait until the counts of so many ended requests agree; returns what was wasted."""

    def is_even() -> bool:
        with service.database.connect() as connection:
            found = compare(connection, service.step_logs)
            return found.is_even and found.num_requests == num_requests

    until(is_even)
    with service.database.connect() as connection:
        assert read_violations(connection) == []
        return compare(connection, service.step_logs).wasted


async def test_every_way_to_end_leaves_the_counts_even(service: Service) -> None:
    service.start_replica(delay_ms=5)
    async with service.caller() as caller:
        plain = caller.ask(service.request(b"said to the end"))
        stopped = caller.ask(service.request(b"up to here, and no more of it", stop=("here",)))
        choices = caller.ask(service.request(b"three of us", n=3))
        late = caller.ask(service.request(b"x" * 200, max_tokens=200, life_s=0.4))
        leaving = service.request(b"y" * 200, max_tokens=200)
        left = asyncio.create_task(caller.ask(leaving))
        await asyncio.to_thread(until, lambda: service.num_deltas(leaving.request_id) > 3)
        invoke(service.client, cancel(service.keys, leaving.request_id))
        await asyncio.gather(plain, stopped, choices, late, left)
    waste = await asyncio.to_thread(wait_until_even, service, 5)
    assert set(waste) <= {WasteReason.STOP}


async def test_tokens_that_a_dead_replica_could_not_publish_are_its_waste(
    service: Service,
) -> None:
    first = service.start_replica(delay_ms=20)
    async with service.caller() as caller:
        request = service.request(b"z" * 120, max_tokens=120)
        asked = asyncio.create_task(caller.ask(request))
        await asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 5)
        # As if it had been killed between the step and its publication, two tokens long.
        first.replica.steps.step({request.request_id: 2})
        service.start_replica(delay_ms=5)
        await asyncio.to_thread(first.drain)
        await asked
    with service.database.begin() as connection:
        found = compare(connection, service.step_logs)
        assert [off.difference for off in found.off] == [2]
    assert book_the_dead(service.database, service.step_logs) == 2
    assert book_the_dead(service.database, service.step_logs) == 0
    waste = await asyncio.to_thread(wait_until_even, service, 1)
    assert waste == {WasteReason.REPLICA_LOST: 2}


async def test_a_request_ends_while_the_ledger_is_away_and_is_settled_later(
    service: Service,
) -> None:
    service.start_replica(delay_ms=5)
    name = service.database.url.database
    with service.database.connect().execution_options(isolation_level="AUTOCOMMIT") as admin:
        async with service.caller() as caller:
            request = service.request(b"w" * 60)
            asked = asyncio.create_task(caller.ask(request))
            await asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 3)
            stop = threading.Event()
            away = asyncio.create_task(asyncio.to_thread(keep_away, service, name, stop))
            answer = await asked
            stop.set()
            await away
        del admin
    assert not answer.last.is_settled
    assert answer.last.usage is not None
    assert service.state(request.request_id) == "held"
    assert settle_late(service.database, service.client) == 1
    assert settle_late(service.database, service.client) == 0
    assert [row[:2] for row in service.usage(request.request_id)] == [
        (60, answer.last.usage.completion_tokens)
    ]
    await asyncio.to_thread(wait_until_even, service, 1)


def keep_away(service: Service, name: str | None, stop: threading.Event) -> None:
    """Lock the table that every settlement changes."""
    with service.database.connect() as connection:
        connection.execute(text("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE"))
        stop.wait(30)
        connection.rollback()
