"""Leases: who may write, who may not any more, and that nobody waits for anybody."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from control.batches.batch import mint_batch_id
from control.batches.items import (
    Item,
    ItemResult,
    claim_items,
    end_item,
    release_items,
    renew_leases,
    renew_request,
)
from control.batches.turn import try_turn
from control.database.connection import connect_async
from control.files.files import mint_file_id
from control.identity.request_id import mint_request_id
from control.identity.tenants import create_tenant

NUM_LINES = 10
DONE = ItemResult(status_code=200, response=b"{}")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[AsyncEngine]:
    """The database, for as many as want to claim."""
    engine = connect_async(database_url, "test items", pool_size=8)
    yield engine
    await engine.dispose()


@pytest.fixture
async def batch_id(database: AsyncEngine) -> str:
    """A batch in progress with ten lines."""
    batch_id = mint_batch_id(time.time(), secrets.randbits(98))
    file_id = mint_file_id(time.time(), secrets.randbits(98))
    async with database.begin() as connection:
        tenant = await connection.run_sync(create_tenant, batch_id)
        values = {"batch": batch_id, "file": file_id, "tenant": tenant.tenant_id}
        await connection.execute(
            text(
                "INSERT INTO files (file_id, tenant_id, purpose, filename, num_bytes, expires_at) "
                "VALUES (:file, :tenant, 'batch', 'x', 0, now() + interval '1 day')"
            ),
            values,
        )
        await connection.execute(
            text(
                "INSERT INTO batches (batch_id, status, tenant_id, key_id, endpoint, "
                "completion_window, input_file_id, total, expires_at) VALUES (:batch, "
                "'in_progress', :tenant, 'k', '/v1/completions', '24h', :file, 10, :end)"
            ),
            values | {"end": datetime.now(UTC) + timedelta(days=1)},
        )
        await connection.execute(
            text(
                "INSERT INTO batch_items (batch_id, line, custom_id, body) "
                "SELECT :batch, line, 'id-' || line, '{}' FROM generate_series(1, 10) AS line"
            ),
            values,
        )
    return batch_id


def fresh_ids(count: int) -> list[str]:
    """Request ids nobody has."""
    return [mint_request_id(time.time(), secrets.randbits(98)) for _ in range(count)]


async def claim(database: AsyncEngine, batch_id: str, count: int) -> list[Item]:
    """Claim in a transaction of its own."""
    async with database.begin() as connection:
        return await claim_items(connection, batch_id, fresh_ids(count))


async def let_leases_lapse(database: AsyncEngine, batch_id: str) -> None:
    """As if the holder had been away for longer than its lease."""
    async with database.begin() as connection:
        await connection.execute(
            text(
                "UPDATE batch_items SET leased_until = now() - interval '1 second' "
                "WHERE batch_id = :batch AND state = 'running'"
            ),
            {"batch": batch_id},
        )


async def test_many_workers_claim_every_line_once(database: AsyncEngine, batch_id: str) -> None:
    claims = await asyncio.gather(*(claim(database, batch_id, 3) for _ in range(8)))
    lines = [item.line for items in claims for item in items]
    assert sorted(lines) == list(range(1, NUM_LINES + 1))
    assert len({item.request_id for items in claims for item in items}) == NUM_LINES


async def test_a_released_line_keeps_its_request(database: AsyncEngine, batch_id: str) -> None:
    first = await claim(database, batch_id, NUM_LINES)
    async with database.begin() as connection:
        assert await release_items(connection, first) == NUM_LINES
    second = await claim(database, batch_id, NUM_LINES)
    assert [i.request_id for i in second] == [i.request_id for i in first]
    assert [i.epoch for i in second] == [2] * NUM_LINES


async def test_a_worker_that_was_away_too_long_writes_nothing(
    database: AsyncEngine, batch_id: str
) -> None:
    stale = await claim(database, batch_id, NUM_LINES)
    await let_leases_lapse(database, batch_id)
    held = await claim(database, batch_id, NUM_LINES)
    assert [i.line for i in held] == [i.line for i in stale]
    async with database.begin() as connection:
        assert await renew_leases(connection, stale) == frozenset()
        assert not await end_item(connection, stale[0], DONE)
        assert not await renew_request(connection, stale[0], fresh_ids(1)[0])
        assert await release_items(connection, stale) == 0
    async with database.begin() as connection:
        assert await renew_leases(connection, held) == frozenset(range(1, NUM_LINES + 1))
        assert await end_item(connection, held[0], DONE)
        # A result is written once, even by its rightful holder.
        assert not await end_item(connection, held[0], DONE)


async def test_an_ended_line_is_never_claimed_again(database: AsyncEngine, batch_id: str) -> None:
    items = await claim(database, batch_id, NUM_LINES)
    async with database.begin() as connection:
        for item in items:
            assert await end_item(connection, item, DONE)
    await let_leases_lapse(database, batch_id)
    assert await claim(database, batch_id, NUM_LINES) == []


async def test_at_most_so_many_workers_have_a_turn_and_a_turn_ends_with_its_holder(
    database: AsyncEngine, batch_id: str
) -> None:
    async with try_turn(database, batch_id, 2) as first, try_turn(database, batch_id, 2) as second:
        assert first is not None
        assert second is not None
        await first.renew()
        async with try_turn(database, batch_id, 2) as third:
            assert third is None
        async with try_turn(database, "batch_of_somebody_else", 2) as other:
            assert other is not None
    async with asyncio.timeout(5):
        while True:  # The server notices a closed connection when it comes to it.
            async with try_turn(database, batch_id, 1) as again:
                if again is not None:
                    break
