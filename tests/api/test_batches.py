"""The Batches API over real HTTP; the work itself is shown in tests/workers."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import redis
from sqlalchemy import text

from control.batches.doorbell import QUEUE
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.workers.service import until


@dataclass(slots=True)
class Batches:
    """A gateway, two tenants' clients, and the broker that it rings."""

    http: httpx.Client
    stranger: httpx.Client
    sdk: openai.OpenAI
    broker: redis.Redis
    file_id: str

    def create(self, **changes: object) -> httpx.Response:
        """Ask for a batch, a good one but for the changes."""
        fields: dict[str, object] = {
            "input_file_id": self.file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        return self.http.post("/v1/batches", json=fields | changes)


@pytest.fixture
def batches(
    start_gateway: Callable[..., LiveGateway], served: Served, tmp_path: Path, broker_url: str
) -> Iterator[Batches]:
    """The API with one file uploaded and nobody at work."""
    path, _, number = broker_url.removeprefix("redis+socket://").partition("?virtual_host=")
    broker = redis.Redis(unix_socket_path=path, db=int(number))
    broker.flushdb()
    live = start_gateway(data_dir=tmp_path, CELERY_BROKER_URL=broker_url)
    clients = []
    for tenant in (f"batches-{secrets.token_hex(4)}", f"strangers-{secrets.token_hex(4)}"):
        _, key = served.new_key("batch", tenant=tenant)
        headers = {"authorization": f"Bearer {key}"}
        base = f"http://127.0.0.1:{live.port}"
        clients.append((key, httpx.Client(base_url=base, headers=headers, timeout=30)))
    (key, http), (_, stranger) = clients
    sdk = openai.OpenAI(base_url=live.url, api_key=key, max_retries=0)
    with http, stranger, sdk:
        file = sdk.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        yield Batches(http, stranger, sdk, broker, file.id)
    broker.close()


def test_the_official_client_reads_every_field_of_a_new_batch(batches: Batches) -> None:
    batch = batches.sdk.batches.create(
        input_file_id=batches.file_id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"who": "me"},
    )
    assert batch.id.startswith("batch_")
    assert batch.object == "batch"
    assert batch.status == "validating"
    assert batch.metadata == {"who": "me"}
    assert batch.expires_at is not None
    assert batch.expires_at - batch.created_at == 86_400
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0
    assert batches.sdk.batches.retrieve(batch.id) == batch
    assert [each.id for each in batches.sdk.batches.list()] == [batch.id]
    shown = batches.http.get(f"/v1/batches/{batch.id}").json()
    assert set(shown) == {
        *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
        *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at"),
        *("expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
        *("cancelling_at", "cancelled_at", "request_counts", "usage", "metadata"),
        "x_expected_completion_at",
    }
    assert shown["usage"] == {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }


def test_the_doorbell_carries_the_batchs_id_and_no_more(batches: Batches) -> None:
    batch_id = batches.create().json()["id"]
    until(lambda: batches.broker.llen(QUEUE) == 1)
    assert batch_id in _told(batches)


def test_a_batch_is_accepted_while_the_broker_is_away(
    start_gateway: Callable[..., LiveGateway], served: Served, tmp_path: Path, batches: Batches
) -> None:
    url = "redis://127.0.0.1:1/0"
    live = start_gateway(data_dir=tmp_path, CELERY_BROKER_URL=url)
    headers = dict(batches.http.headers)
    body = {
        "input_file_id": batches.file_id,
        "endpoint": "/v1/completions",
        "completion_window": "1h",
    }
    response = httpx.post(f"{live.url}/batches", json=body, headers=headers, timeout=10)
    assert response.status_code == 200
    assert response.json()["status"] == "validating"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "48h"}, 400, "completion_window"),
        ({"completion_window": 24}, 400, "completion_window"),
        ({"metadata": {"k": 1}}, 400, "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, None),
        ({"colour": "red"}, 400, "colour"),
        ({"input_file_id": "file-" + "0" * 26}, 404, "input_file_id"),
        ({"input_file_id": "../../etc\0"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
    ],
)
def test_a_wrong_batch_is_refused(
    batches: Batches, changes: dict[str, object], status: int, param: str | None
) -> None:
    response = batches.create(**changes)
    assert response.status_code == status, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
    assert batches.http.get("/v1/batches").json()["data"] == []


def test_another_tenants_file_and_batch_are_told_like_none(batches: Batches) -> None:
    body = {
        "input_file_id": batches.file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    theirs = batches.stranger.post("/v1/batches", json=body)
    nobody = "file-" + "0" * 26
    invented = batches.stranger.post("/v1/batches", json=body | {"input_file_id": nobody})
    assert theirs.status_code == invented.status_code == 404
    assert theirs.text.replace(batches.file_id, nobody) == invented.text
    batch_id = batches.create().json()["id"]
    assert batches.stranger.get(f"/v1/batches/{batch_id}").status_code == 404
    assert batches.stranger.post(f"/v1/batches/{batch_id}/cancel").status_code == 404
    assert batches.stranger.get("/v1/batches").json()["data"] == []
    assert batches.stranger.get(f"/v1/batches?after={batch_id}").status_code == 400


def test_pages_are_newest_first(batches: Batches) -> None:
    ids = [batches.create().json()["id"] for _ in range(5)]
    page = batches.http.get("/v1/batches", params={"limit": 3}).json()
    assert [batch["id"] for batch in page["data"]] == ids[:1:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[4], ids[2], True)
    page = batches.http.get("/v1/batches", params={"limit": 3, "after": ids[2]}).json()
    assert [batch["id"] for batch in page["data"]] == ids[1::-1]
    assert page["has_more"] is False


def test_a_batch_is_cancelled_once_and_an_ended_one_not_at_all(
    batches: Batches, served: Served
) -> None:
    batch_id = batches.create().json()["id"]
    for _ in range(2):
        batch = batches.sdk.batches.cancel(batch_id)
        assert batch.status == "cancelling"
        assert batch.cancelling_at is not None
    with served.database.begin() as connection:
        connection.execute(
            text(
                "UPDATE batches SET status = 'cancelled', cancelled_at = now() "
                "WHERE batch_id = :batch_id"
            ),
            {"batch_id": batch_id},
        )
    response = batches.http.post(f"/v1/batches/{batch_id}/cancel")
    assert response.status_code == 409
    assert response.headers["x-should-retry"] == "false"


def test_a_file_that_a_batch_reads_is_not_deleted(batches: Batches) -> None:
    batches.create()
    response = batches.http.delete(f"/v1/files/{batches.file_id}")
    assert response.status_code == 409
    assert batches.http.get(f"/v1/files/{batches.file_id}").status_code == 200


def _told(batches: Batches) -> str:
    """The arguments of the one message that waits."""
    import base64
    import json

    messages = batches.broker.lrange(QUEUE, 0, -1)
    assert isinstance(messages, list)
    [message] = messages
    args, kwargs, _ = json.loads(base64.b64decode(json.loads(message)["body"]))
    assert kwargs == {}
    [told] = args
    return str(told)
