"""Settling: once per request, fenced by the attempt, complete or not at all."""

import secrets
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from control.database.connection import connect
from control.identity.request_id import created_at_of, mint_request_id
from control.identity.tenants import create_tenant
from control.metering.settlement import (
    ChoiceOutput,
    Claim,
    Settlement,
    begin_attempt,
    read_ending,
    settle,
)
from control.metering.timings import Timings
from engine.interface.generation_delta import FinishReason, Usage


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    engine = connect(database_url, "test")
    yield engine
    engine.dispose()


def hold(connection: Connection) -> str:
    """A held request of a tenant of its own."""
    tenant = create_tenant(connection, secrets.token_hex(8))
    request_id = mint_request_id(time.time(), secrets.randbits(98))
    connection.execute(
        text(
            """
            INSERT INTO requests (created_at, request_id, tenant_id, key_id, model, version,
                                  weights_digest, priority_class, endpoint, reserved_tokens,
                                  prompt_tokens)
            VALUES (:created_at, :request_id, :tenant_id, 'k', 'm', 'v1', 'd', 'interactive',
                    '/v1/completions', 20, 10)
            """
        ),
        {
            "created_at": created_at_of(request_id),
            "request_id": request_id,
            "tenant_id": tenant.tenant_id,
        },
    )
    return request_id


def finished(request_id: str, attempt: int = 1) -> Settlement:
    return Settlement(
        request_id,
        attempt,
        Usage(10, 5, 0),
        finish_reasons=(FinishReason.STOP, None),
        replica_id="r1",
        timings=Timings(0.1, 0.0, 0.2, 0.3),
        outputs=(ChoiceOutput(0, (1, 2**31 - 1), "a\x00é", FinishReason.STOP),),
    )


def test_many_requests_settle_in_one_statement(database: Engine) -> None:
    with database.begin() as connection:
        ids = [hold(connection) for _ in range(20)]
        assert settle(connection, [finished(i) for i in ids]) == frozenset(ids)
        for request_id in ids:
            ending = read_ending(connection, request_id)
            assert ending is not None
            assert (ending.usage, ending.error) == (Usage(10, 5, 0), None)
        row = connection.execute(
            text("SELECT token_ids, text FROM request_outputs WHERE request_id = :id"),
            {"id": ids[0]},
        ).one()
        assert row.token_ids == [1, 2**31 - 1]
        assert bytes(row.text).decode() == "a\x00é"


def test_a_second_settlement_changes_nothing(database: Engine) -> None:
    with database.begin() as connection:
        request_id = hold(connection)
        assert settle(connection, [finished(request_id)])
    again = Settlement(request_id, 1, Usage(10, 9), error="cancelled")
    with database.begin() as connection:
        assert settle(connection, [again]) == frozenset()
        ending = read_ending(connection, request_id)
        assert ending is not None
        assert ending.usage.completion_tokens == 5


def test_only_the_newest_attempt_settles(database: Engine) -> None:
    with database.begin() as connection:
        request_id = hold(connection)
        assert begin_attempt(connection, request_id, 3) is Claim.OURS
        assert begin_attempt(connection, request_id, 3) is Claim.OVERTAKEN
        assert begin_attempt(connection, request_id, 2) is Claim.OVERTAKEN
        assert settle(connection, [finished(request_id, attempt=1)]) == frozenset()
        assert settle(connection, [finished(request_id, attempt=3)]) == {request_id}
        assert begin_attempt(connection, request_id, 4) is Claim.ENDED
        unknown = mint_request_id(time.time(), secrets.randbits(98))
        assert begin_attempt(connection, unknown, 2) is Claim.UNKNOWN


def test_an_ending_is_not_there_before_it_happened(database: Engine) -> None:
    with database.begin() as connection:
        assert read_ending(connection, hold(connection)) is None


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE usage_events SET completion_tokens = 0 WHERE request_id = :id",
        "DELETE FROM usage_events WHERE request_id = :id",
        "TRUNCATE usage_events",
        "UPDATE requests SET ended_at = NULL WHERE request_id = :id",
        "UPDATE requests SET state = 'failed' WHERE request_id = :id",
    ],
)
def test_the_tables_defend_what_was_settled(database: Engine, statement: str) -> None:
    with database.begin() as connection:
        request_id = hold(connection)
        settle(connection, [finished(request_id)])
    with pytest.raises(DBAPIError), database.begin() as connection:
        connection.execute(text(statement), {"id": request_id} if ":id" in statement else {})


def test_token_counts_beyond_32_bits_are_kept(database: Engine) -> None:
    usage = Usage(3 * 10**9, 4 * 10**9, 0)
    with database.begin() as connection:
        request_id = hold(connection)
        settle(connection, [Settlement(request_id, 1, usage)])
        ending = read_ending(connection, request_id)
    assert ending is not None
    assert ending.usage == usage
