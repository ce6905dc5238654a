"""The description of the API, and requests made from it."""

import httpx
import pytest

from tests.api.admin_client import Admin
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.openapi_fuzz import OpenAPIFuzz
from tests.api.scripted_replica import ScriptedReplica

NUM_CASES = 8
EVERY_SCOPE = ("inference", "batch", "usage")


@pytest.fixture
def key(served: Served) -> str:
    return served.new_key(*EVERY_SCOPE)[1]


def test_strangers_are_not_told_what_there_is(live: LiveGateway, served: Served) -> None:
    url = f"http://127.0.0.1:{live.port}/openapi.json"
    assert httpx.get(url).status_code == 401
    for scope in EVERY_SCOPE:
        _, key = served.new_key(scope)
        assert httpx.get(url, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_bodies_are_described_without_what_is_only_refused(live: LiveGateway, key: str) -> None:
    url = f"http://127.0.0.1:{live.port}/openapi.json"
    described = httpx.get(url, headers={"Authorization": f"Bearer {key}"}).json()
    schemas = described["components"]["schemas"]
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    assert {"model", "messages", "temperature", "logprobs"} <= chat["properties"].keys()
    assert {"model", "prompt", "echo"} <= completion["properties"].keys()
    assert {"tools", "audio", "store"}.isdisjoint(chat["properties"])
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/files", "/v1/batches"):
        operation = described["paths"][path]["post"]
        assert operation["requestBody"]["required"]
        assert operation["security"] == [{"key": []}]
        assert set(operation["responses"]) == {"200", "default"}


def test_nothing_that_can_be_asked_is_answered_with_a_fault_of_ours(
    live: LiveGateway, served: Served, replica: ScriptedReplica, key: str, operator: Admin
) -> None:
    """A few cases of each kind; the module's own command makes thousands."""
    del replica
    url, model = f"http://127.0.0.1:{live.port}", served.version.model
    with OpenAPIFuzz(url, key, operator.key, model) as fuzz:
        answered = dict(fuzz.run(NUM_CASES))
    assert len(answered) >= 16
    assert all(sum(statuses.values()) >= NUM_CASES for statuses in answered.values())
    assert answered["POST /v1/chat/completions"][200]
    assert answered["POST /admin/keys/{key_id}/revoke"][200], answered
