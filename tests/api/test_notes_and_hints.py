"""Fields that no token depends on: what is written down, and what is only a hint."""

from dataclasses import replace

import httpx
import pytest
from sqlalchemy import text

from engine.interface.generation_request import GenerationRequest
from tests.api.conftest import Served
from tests.api.scripted_replica import ScriptedReplica

CHAT = {"messages": [{"role": "user", "content": "a"}], "seed": 1, "max_tokens": 4}


def asked_of_the_engine(
    http: httpx.Client, served: Served, replica: ScriptedReplica, fields: dict[str, object]
) -> GenerationRequest:
    """The order that a chat comes to, without what makes each request another one."""
    replica.forget()
    answer = http.post("/v1/chat/completions", json={"model": served.model, **CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return replace(replica.latest().request, request_id="", arrival=0.0, deadline_at=0.0)


def test_metadata_stands_in_the_ledger(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    metadata = {"team": "search", "ticket": "é" * 512}
    body = {"model": served.model, **CHAT, "metadata": metadata}
    answer = http.post("/v1/chat/completions", json=body)
    request_id = answer.json()["id"].removeprefix("chatcmpl-")
    assert replica.latest().request.request_id == request_id
    with served.database.connect() as connection:
        found = connection.execute(
            text("SELECT metadata FROM requests WHERE request_id = :id"), {"id": request_id}
        ).scalar_one()
    assert found == metadata


@pytest.mark.parametrize(
    "hint",
    [
        {"user": "somebody"},
        {"safety_identifier": "somebody"},
        {"prompt_cache_key": "a conversation"},
        {"service_tier": "flex"},
        {"service_tier": "priority"},
        {"metadata": {"a": "b"}},
        {"store": False},
    ],
)
def test_a_hint_changes_nothing_that_is_computed_or_shared(
    http: httpx.Client, served: Served, replica: ScriptedReplica, hint: dict[str, object]
) -> None:
    plain = asked_of_the_engine(http, served, replica, {})
    assert asked_of_the_engine(http, served, replica, hint) == plain
