"""A call that is repeated is made once: under its key, or as an SDK's own repetition."""

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import httpx2
import openai
import pytest
from sqlalchemy import text

from control.admission.idempotency import prune_keys
from control.protocol.canonical_body import body_hash
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import (
    Run,
    ScriptedReplica,
    talk_until_cancelled,
)
from tests.api.test_resume import Paced, Start, events, is_kept, start, words_of
from tests.end_to_end.live_service import until

__all__ = ["start"]

WAIT_S = 10


def post(
    http: httpx.Client, served: Served, key: str | None = None, **more: object
) -> httpx.Response:
    headers = more.pop("headers", None) or {}
    assert isinstance(headers, dict)
    path = str(more.pop("path", "/v1/completions"))
    if key is not None:
        headers = {"idempotency-key": key, **headers}
    body: dict[str, object] = {"model": served.model, "prompt": "hi", **more}
    return http.post(path, json=body, headers=headers)


def new_key() -> str:
    return secrets.token_hex(8)


def num_billed(served: Served, replica: ScriptedReplica) -> int:
    """How many of the replica's requests are in the ledger and not known to be undelivered."""
    with served.database.connect() as connection:
        count: int = connection.execute(
            text(
                """
                SELECT count(*) FROM usage_events u WHERE request_id = ANY(:ids)
                AND NOT EXISTS (SELECT FROM undelivered_requests n
                                WHERE n.request_id = u.request_id)
                """
            ),
            {"ids": list(replica.runs)},
        ).scalar_one()
    return count


def broken(served: Served, request_id: str) -> tuple[bool, bool] | None:
    """Of a request that broke: whether a repetition took it, and whether it counts as heard."""
    with served.database.connect() as connection:
        row = connection.execute(
            text(
                "SELECT retried_by IS NOT NULL, was_heard OR heard_at IS NOT NULL"
                " FROM broken_requests WHERE request_id = :id"
            ),
            {"id": request_id},
        ).one_or_none()
    return None if row is None else (row[0], row[1])


def test_a_repeated_call_is_answered_the_same_and_made_once(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    key = new_key()
    first = post(http, served, key, temperature=1)
    assert "idempotent-replayed" not in first.headers
    again = post(http, served, key, temperature=1.0)
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.status_code, again.content) == (first.status_code, first.content)
    streamed = events(post(http, served, key, temperature=1, stream=True).text)
    assert words_of(streamed) == "Hello world"
    assert streamed[0][0] == f"{first.json()['id']}:1"
    after = post(
        http,
        served,
        key,
        temperature=1,
        stream=True,
        headers={"last-event-id": f"{first.json()['id']}:1"},
    )
    assert words_of(events(after.text)) == " world"
    assert len(replica.runs) == 1
    assert num_billed(served, replica) == 1


def test_calls_that_race_under_one_key_share_one_request(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    key = new_key()
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(post, http, served, key, stream=n % 2 == 0) for n in range(20)]
        answers = [call.result() for call in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers[1::2]}) == 1
    assert {words_of(events(answer.text)) for answer in answers[::2]} == {"Hello world"}
    assert len(replica.runs) == 1


@pytest.mark.parametrize("num_said", [1, 2])
def test_a_key_outlives_the_log(
    http: httpx.Client, served: Served, replica: ScriptedReplica, num_said: int
) -> None:
    key = new_key()
    first = post(http, served, key, logprobs=None)
    keys, (request_id,) = ModelKeys(served.model), replica.runs
    served.client.delete(keys.live(request_id), keys.log(request_id))
    assert post(http, served, key, logprobs=None).content == first.content
    completion_id = first.json()["id"]
    rest = http.get(f"/v1/completions/{completion_id}/stream", params={"starting_after": num_said})
    assert rest.status_code == 200
    assert events(rest.text)[-1] == (None, "[DONE]")
    whole = http.get(f"/v1/completions/{completion_id}/stream")
    assert words_of(events(whole.text)) == "Hello world"
    assert len(replica.runs) == 1


def test_another_body_under_the_key_is_refused_and_told_nothing(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    key = new_key()
    post(http, served, key)
    other = post(http, served, key, max_tokens=3)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert other.json()["error"]["type"] == "idempotency_error"
    assert "Hello" not in other.text


def test_a_key_is_its_tenants_own_and_its_endpoints(
    http: httpx.Client, live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    key = new_key()
    _, stranger = served.new_key("inference", tenant=f"stranger-{key}")
    mine = post(http, served, key)
    headers = {"authorization": f"Bearer {stranger}"}
    base = f"http://127.0.0.1:{live.port}"
    with httpx.Client(base_url=base, headers=headers) as other:
        theirs = post(other, served, key)
    assert theirs.json()["id"] != mine.json()["id"]
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": served.model, **messages}
    chat = http.post("/v1/chat/completions", json=body, headers={"idempotency-key": key})
    assert chat.json()["object"] == "chat.completion"
    assert len(replica.runs) == 3


def test_a_call_that_will_not_wait_is_told_when_to_come_back(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    key, script = new_key(), Paced("Hello", " world")
    replica.script = script
    stream = start({"idempotency-key": key})
    script.let()
    stream.read("Hello")
    busy = post(http, served, key, prompt="x", headers={"prefer": "respond-async"})
    messages = [{"role": "user", "content": "hi"}]
    elsewhere = http.post(
        "/v1/chat/completions",
        json={"model": served.model, "messages": messages},
        headers={"idempotency-key": key},
    )
    for refused in (busy, elsewhere):
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "request_in_progress"
        assert refused.headers["retry-after-ms"] == "1000"
    script.let()
    assert words_of(stream.events()) == "Hello world"
    done = post(http, served, key, prompt="x", headers={"prefer": "respond-async"})
    assert done.json()["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize("error", ["replica_lost", "deadline_exceeded", "request_lost"])
def test_what_failed_before_a_word_is_run_afresh(
    http: httpx.Client, served: Served, replica: ScriptedReplica, error: str
) -> None:
    key = new_key()
    has_failed = threading.Event()

    def fail_once(run: Run) -> Iterator[GenerationDelta]:
        if has_failed.is_set():
            yield run.say("Better", num_tokens=3)
            yield run.end()
            return
        has_failed.set()
        yield run.end(error)

    replica.script = fail_once
    assert post(http, served, key).status_code >= 500
    assert post(http, served, key).json()["choices"][0]["text"] == "Better"
    assert len(replica.runs) == 2


def test_what_failed_after_words_is_told_again_with_its_usage(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    def fail(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Half", num_tokens=3)
        yield run.end("replica_lost")

    replica.script = fail
    key = new_key()
    first = post(http, served, key)
    again = post(http, served, key)
    assert first.status_code == again.status_code == 503
    assert first.json() == again.json()
    assert again.json()["x_usage"]["completion_tokens"] == 3
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-should-retry"] == "false"
    *_, error, done = events(post(http, served, key, stream=True).text)
    assert json.loads(error[1])["x_usage"]["completion_tokens"] == 3
    assert done[1] == "[DONE]"
    assert len(replica.runs) == 1


def test_a_refused_call_leaves_no_key(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    unserved = served.register("refused")
    served.client.delete(ModelKeys(unserved).serving(served.version.weights_digest))
    gateway = start_gateway()
    headers = {"authorization": f"Bearer {served.key}"}
    key = new_key()
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}", headers=headers) as http:
        assert post(http, served, key, model=unserved).status_code == 503
        assert post(http, served, key, max_tokens="many").status_code == 400
        assert post(http, served, key).status_code == 200


def test_a_request_that_was_accepted_and_never_queued_is_queued_by_its_repetition(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    """Its gateway died between the two."""
    key = new_key()
    first = post(http, served, key)
    lost = new_key()
    (request_id,) = replica.runs
    twin = request_id[:-1] + ("0" if request_id[-1] != "0" else "1")
    with served.database.begin() as connection:
        names = (
            "tenant_id, key_id, model, version, weights_digest, priority_class, endpoint,"
            " reserved_tokens, prompt_tokens, answer_form"
        )
        connection.execute(
            text(
                f"INSERT INTO requests (created_at, request_id, {names})"
                f" SELECT created_at, :twin, {names} FROM requests WHERE request_id = :id"
            ),
            {"twin": twin, "id": request_id},
        )
        connection.execute(
            text(
                "INSERT INTO idempotency_keys (tenant_id, endpoint, key, body_hash, object_id)"
                " SELECT tenant_id, endpoint, :lost, body_hash, :twin FROM idempotency_keys"
                " WHERE key = :key"
            ),
            {"lost": lost, "twin": twin, "key": key},
        )
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, http, served, lost) for _ in range(2)]
        answers = [call.result() for call in asked]
    assert {answer.json()["id"] for answer in answers} == {f"cmpl-{twin}"}
    assert answers[0].json()["choices"] == first.json()["choices"]
    assert set(replica.runs) == {request_id, twin}


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
def test_a_key_that_is_none_is_refused(http: httpx.Client, served: Served, key: str) -> None:
    refused = post(http, served, key)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "idempotency-key"


def test_keys_are_forgotten_after_a_day(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    key = new_key()
    post(http, served, key)
    with served.database.begin() as connection:
        connection.execute(
            text(
                "UPDATE idempotency_keys SET created_at = now() - interval '24 hours 1 second'"
                " WHERE key = :key"
            ),
            {"key": key},
        )
    assert post(http, served, key, max_tokens=3).status_code == 200
    with served.database.begin() as connection:
        connection.execute(text("UPDATE idempotency_keys SET created_at = '2020-01-01'"))
        assert prune_keys(connection) > 0
        assert prune_keys(connection) == 0
        kept = connection.execute(
            text("SELECT count(*) FROM request_outputs WHERE request_id = ANY(:ids)"),
            {"ids": list(replica.runs)},
        )
        assert kept.scalar_one() == 1  # that of the key which was taken over


def test_what_a_body_means_decides_not_how_it_is_written() -> None:
    one = {"a": 1.0, "b": [{"x": None, "y": 2.5}], "stream": True}
    other = {"b": [{"y": 2.5, "x": None}], "a": 1, "stream_options": {}}
    assert body_hash(one) == body_hash(other)
    for different in ({"a": 1}, {"a": 2, "b": one["b"]}, {"a": True, "b": one["b"]}):
        assert body_hash(one) != body_hash(different)


def test_batches_and_files_are_made_once_under_a_key(http: httpx.Client, served: Served) -> None:
    _, key = served.new_key("batch", tenant=f"keys-{new_key()}")
    headers = {"authorization": f"Bearer {key}", "idempotency-key": new_key()}

    def upload(content: bytes) -> httpx.Response:
        return http.post(
            "/v1/files",
            files={"file": ("in.jsonl", content)},
            data={"purpose": "batch"},
            headers=headers,
        )

    file = upload(b"{}\n")
    assert upload(b"{}\n").content == file.content
    assert upload(b"{}\n").headers["idempotent-replayed"] == "true"
    assert upload(b"[]\n").status_code == 422
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = http.post("/v1/batches", json=body, headers=headers)
    assert batch.status_code == 200
    assert http.post("/v1/batches", json=body, headers=headers).content == batch.content
    other = http.post("/v1/batches", json={**body, "completion_window": "4h"}, headers=headers)
    assert other.status_code == 422
    path = f"/v1/batches/{batch.json()['id']}/cancel"
    cancelled = http.post(path, headers=headers)
    assert cancelled.status_code == 200
    assert http.post(path, headers=headers).content == cancelled.content
    shown = http.get("/v1/batches", headers={"authorization": headers["authorization"]})
    assert len(shown.json()["data"]) == 1


RETRIED = {"x-stainless-retry-count": "1", "x-stainless-read-timeout": "600"}
FIRST = {"x-stainless-retry-count": "0"}


def test_a_repetition_without_a_key_is_given_its_own_broken_request(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    script = Paced("Hello", " world")
    replica.script = script
    stream = start({**FIRST, "x-resume-grace": "30"})
    run = replica.latest()
    stream.leave()
    until(lambda: broken(served, run.request.request_id) is not None, WAIT_S)
    assert is_kept(served, run)
    answers: list[httpx.Response] = []
    repeated = threading.Thread(
        target=lambda: answers.append(post(http, served, prompt="x", headers=RETRIED))
    )
    repeated.start()
    until(lambda: not is_kept(served, run), WAIT_S)
    script.let(2)
    repeated.join(WAIT_S)
    assert answers[0].json()["id"] == f"cmpl-{run.request.request_id}"
    until(lambda: broken(served, run.request.request_id) == (True, True), WAIT_S)
    assert num_billed(served, replica) == 1
    # It went to one repetition; another asks anew.
    script.let(2)
    assert post(http, served, prompt="x", headers=RETRIED).json()["id"] != answers[0].json()["id"]


def test_what_broke_off_with_its_connection_is_on_nobodys_invoice(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    script = Paced("Hello", " world")
    replica.script = script
    stream = start(FIRST, stream=False)
    run = replica.latest()
    script.let()
    until(lambda: len(run.said) == 1, WAIT_S)
    stream.leave()
    assert run.ended.wait(WAIT_S)
    until(lambda: broken(served, run.request.request_id) == (False, False), WAIT_S)
    script.let(2)
    again = post(http, served, prompt="x", headers=RETRIED)
    assert again.json()["id"] != f"cmpl-{run.request.request_id}"
    assert len(replica.runs) == 2
    assert num_billed(served, replica) == 1


def test_equal_calls_are_never_taken_for_each_other(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    """Nor a call that did not break, nor another API key's or body's; and never by a first call."""
    script = Paced("done")
    replica.script = script
    streams = [start({**FIRST, "x-resume-grace": "30"}) for _ in range(3)]
    until(lambda: len(replica.runs) == 3, WAIT_S)
    for stream in streams[:2]:
        stream.leave()
    until(lambda: sum(broken(served, id_) is not None for id_ in replica.runs) == 2, WAIT_S)
    script.let(100)
    _, other_key = served.new_key("inference")
    strange = {"authorization": f"Bearer {other_key}", **RETRIED}
    before = set(replica.runs)
    ids = [
        post(http, served, prompt="x", headers=FIRST).json()["id"],
        post(http, served, prompt="x", headers=strange).json()["id"],
        post(http, served, prompt="y", headers=RETRIED).json()["id"],
    ]
    assert len(set(ids)) == 3
    assert not {id_.removeprefix("cmpl-") for id_ in ids} & before
    taken = [post(http, served, prompt="x", headers=RETRIED).json()["id"] for _ in range(3)]
    assert len(set(taken)) == 3
    assert len({id_.removeprefix("cmpl-") for id_ in taken} & before) == 2


def test_the_official_client_repeats_a_dropped_call_and_is_billed_once(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    """The first gateway restarts while the call is under way; the repetition hears the same run."""
    script = Paced("Hello", " world")
    replica.script = script
    first, second = start_gateway(), start_gateway()

    class Balancer(httpx2.HTTPTransport):
        """Sends to the first gateway once, then to the second."""

        is_first = True

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            port = first.port if Balancer.is_first else second.port
            Balancer.is_first = False
            request.url = request.url.copy_with(port=port)
            return super().handle_request(request)

    client = openai.OpenAI(
        base_url="http://127.0.0.1:1/v1",
        api_key=served.key,
        max_retries=2,
        http_client=httpx2.Client(transport=Balancer()),
    )
    said: list[str] = []

    def ask() -> None:
        said.append(client.completions.create(model=served.model, prompt="x").choices[0].text)

    with client:
        asking = threading.Thread(target=ask)
        asking.start()
        run = replica.latest()
        first.stop(timeout_s=WAIT_S)
        script.let(2)
        asking.join(WAIT_S)
    assert said == ["Hello world"]
    assert set(replica.runs) == {run.request.request_id}
    # That it was heard is noted after the answer has gone.
    until(lambda: num_billed(served, replica) == 1, WAIT_S)


def test_an_answer_that_was_written_and_not_read_is_given_to_its_repetition(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    stream = start(FIRST, stream=False)
    run = replica.latest()
    assert run.ended.wait(WAIT_S)
    stream.peek()
    stream.leave()  # With what it has not read: a reset.
    until(lambda: broken(served, run.request.request_id) is not None, WAIT_S)
    answer = post(http, served, prompt="x", headers=RETRIED)
    assert answer.json()["id"] == f"cmpl-{run.request.request_id}"
    assert num_billed(served, replica) == len(replica.runs) == 1
    post(http, served, prompt="x", headers=FIRST)  # Read to its end: nothing is noted.
    assert len(replica.runs) == 2
    assert broken(served, replica.latest().request.request_id) is None


def test_one_of_several_callers_may_leave(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    key, script = new_key(), Paced("Hello", " world")
    replica.script = script
    leaving = start({"idempotency-key": key})
    script.let()
    leaving.read("Hello")
    staying = start({"idempotency-key": key})
    staying.read("Hello")
    leaving.leave()
    script.let()
    assert words_of(staying.events()) == "Hello world"
    assert len(replica.runs) == 1


def test_a_keyed_call_that_broke_unheard_is_run_afresh(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    key = new_key()
    replica.script = talk_until_cancelled
    leaving = start({"idempotency-key": key}, stream=False)
    run = replica.latest()
    until(lambda: len(run.said) > 3, WAIT_S)
    leaving.leave()
    assert run.ended.wait(WAIT_S)
    until(lambda: broken(served, run.request.request_id) == (False, False), WAIT_S)
    replica.script = Paced()
    assert post(http, served, key, prompt="x").status_code == 200
    assert len(replica.runs) == 2
    assert num_billed(served, replica) == 1
