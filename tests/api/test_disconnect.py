"""A caller who goes stops the work; one who does not read does not fill our memory."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from api import http_protocol
from control.streams.functions import Argument
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import FinishReason, GenerationDelta
from engine.interface.generation_request import PriorityClass
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.raw_http import connected, read_to_the_end, read_until, request
from tests.api.scripted_replica import (
    Run,
    ScriptedReplica,
    keep_silent_until_cancelled,
    talk_until_cancelled,
)

WAIT_S = 10


def _fin(connection: socket.socket) -> None:
    connection.close()


def _rst(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def _generation(served: Served, *, stream: bool, **fields: object) -> bytes:
    body = {"model": served.model, "prompt": "x", "stream": stream, **fields}
    headers = {"Authorization": f"Bearer {served.key}"}
    return request("/v1/completions", headers=headers, body=json.dumps(body).encode())


@pytest.mark.parametrize("leave", [_fin, _rst, _half_close])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [talk_until_cancelled, keep_silent_until_cancelled])
def test_leaving_cancels_the_request(
    live: LiveGateway,
    served: Served,
    replica: ScriptedReplica,
    leave: Callable[[socket.socket], None],
    stream: bool,
    script: Callable[[Run], Iterator[GenerationDelta]],
) -> None:
    replica.script = script
    with connected(live.port) as connection:
        connection.sendall(_generation(served, stream=stream))
        run = replica.latest()
        if stream and script is talk_until_cancelled:
            read_until(connection, b"word")
        leave(connection)
        assert run.cancelled.wait(WAIT_S)
        assert run.ended.wait(WAIT_S)


@pytest.mark.parametrize("leave", [_fin, _rst, _half_close])
@pytest.mark.parametrize("tail", [b"\r\n", b"GET /v1/mod", b"ANOTHER", b"GET x" * 100_000])
@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_leaving_cancels_whatever_was_sent_behind_the_request(
    live: LiveGateway,
    served: Served,
    replica: ScriptedReplica,
    leave: Callable[[socket.socket], None],
    tail: bytes,
    is_in_one_piece: bool,
) -> None:
    replica.script = keep_silent_until_cancelled
    sent = _generation(served, stream=False)
    behind = sent if tail == b"ANOTHER" else tail
    with connected(live.port) as connection:
        connection.sendall(sent + (behind if is_in_one_piece else b""))
        run = replica.latest()
        if not is_in_one_piece:
            connection.sendall(behind)
        leave(connection)
        assert run.cancelled.wait(WAIT_S)
        assert run.ended.wait(WAIT_S)
    assert len(replica.runs) == 1


def test_leaving_while_queued_cancels_too(
    start_gateway: Callable[..., LiveGateway], served: Served, redis_url: str
) -> None:
    # Nobody takes requests of this name: it is only in the registry.
    unserved = served.register("nobody")
    gateway = start_gateway()
    keys = ModelKeys(unserved)
    with connected(gateway.port) as connection:
        connection.sendall(_generation(served, stream=True, model=unserved))
        assert served.client.xread({_queue(keys): "0"}, block=WAIT_S * 1000)
        (request_id,) = served.client.smembers(keys.open)
    cancels = served.client.xread({_queue(keys): "0"}, block=WAIT_S * 1000)
    seen: list[Argument] = []
    while b"cancelled" not in seen:
        assert isinstance(cancels, list)
        ((_, entries),) = cancels
        seen = [name for _, fields in entries for name in fields]
        last = entries[-1][0]
        if b"cancelled" not in seen:
            cancels = served.client.xread({_queue(keys): last}, block=WAIT_S * 1000)
            assert cancels, "no cancel came"
    assert isinstance(request_id, bytes)
    live = served.client.hget(keys.live(request_id.decode()), "cancelled")
    assert live == b"cancelled"


def test_a_finished_answer_is_not_cancelled(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    for stream in (True, False):
        body = {"model": served.model, "prompt": "x", "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == 200
    for request_id in replica.runs:
        key = ModelKeys(served.model).live(request_id)
        assert served.client.hget(key, "cancelled") is None


def test_nothing_is_kept_of_requests_that_are_over(
    http: httpx.Client, live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    for _ in range(50):
        http.post("/v1/completions", json={"model": served.model, "prompt": "x"})
    assert live.gateway.follower.num_subscriptions == 0


def test_a_reader_that_stops_reading_is_dropped_and_its_request_cancelled(
    live: LiveGateway,
    served: Served,
    replica: ScriptedReplica,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def flood(run: Run) -> Iterator[GenerationDelta]:
        while not run.cancelled.is_set():
            yield run.say("x" * 50_000)
        yield run.end("cancelled")

    monkeypatch.setattr(http_protocol, "READER_LIMIT_S", 0.3)
    replica.script = flood
    with connected(live.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_generation(served, stream=True))
        run = replica.latest()
        assert run.cancelled.wait(WAIT_S)
        assert run.ended.wait(WAIT_S)


def test_streams_hold_no_database_connection(
    live: LiveGateway, served: Served, replica: ScriptedReplica, http: httpx.Client
) -> None:
    replica.script = talk_until_cancelled
    connections = []
    try:
        for _ in range(2 * 8):  # twice the pool
            connection = socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S)
            connection.sendall(_generation(served, stream=True))
            assert connection.recv(65536)
            connections.append(connection)
        assert live.gateway.database.pool.checkedout() == 0  # type: ignore[attr-defined]  # QueuePool's
        assert http.get("/v1/models").status_code == 200
    finally:
        for connection in connections:
            connection.close()


def test_callers_with_one_request_id_get_their_own_words(
    live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    def echo(run: Run) -> Iterator[GenerationDelta]:
        yield run.say(run.prompt, finish=FinishReason.STOP)
        yield run.end()

    replica.script = echo
    _, other_key = served.new_key("inference", tenant=f"{served.model}-other")
    wrong: list[str] = []

    def ask(number: int) -> None:
        headers = {
            "authorization": f"Bearer {served.key if number % 2 else other_key}",
            "x-request-id": "the same",
        }
        body = {"model": served.model, "prompt": f"prompt {number}"}
        answer = httpx.post(f"{live.url}/completions", json=body, headers=headers, timeout=30)
        if answer.json()["choices"][0]["text"] != f"prompt {number}":
            wrong.append(answer.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    scopes = {run.request.cache_scope for run in replica.runs.values()}
    assert len(scopes) == 2


def test_a_full_queue_is_an_overload_that_leaves_nothing_behind(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    unserved = served.register("full")
    gateway = start_gateway(max_queued=1)
    headers = {"authorization": f"Bearer {served.key}"}
    body = {"model": unserved, "prompt": "x"}
    with connected(gateway.port) as connection:
        connection.sendall(_generation(served, stream=True, model=unserved))
        assert served.client.xread({_queue(ModelKeys(unserved)): "0"}, block=WAIT_S * 1000)
        answer = httpx.post(f"{gateway.url}/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert answer.headers["retry-after-ms"] == "1000"
    assert answer.headers["retry-after"] == "1"
    assert served.count_rows(unserved) == 1  # the queued one's


def test_a_drain_ends_open_answers_with_a_word(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    replica.script = talk_until_cancelled
    gateway = start_gateway()
    idle = socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT_S)
    streaming = socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT_S)
    waiting = socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT_S)
    with idle, streaming, waiting:
        streaming.sendall(_generation(served, stream=True))
        read_until(streaming, b"word")
        waiting.sendall(_generation(served, stream=False))
        _wait_for_runs(replica, 2)
        gateway.stop(timeout_s=WAIT_S)
        events = read_to_the_end(streaming)
        assert read_to_the_end(idle) == b""
        refused = read_to_the_end(waiting)
    *_, frame, done = events.decode().split("data: ")
    assert json.loads(frame.split("\n")[0])["error"]["code"] == "server_restarting"
    assert done.startswith("[DONE]\n\n")
    assert refused.startswith(b"HTTP/1.1 503")
    assert b'"code":"server_restarting"' in refused
    for run in replica.runs.values():
        # Kept for a while: its caller may come back, at another gateway.
        kept = served.client.hmget(ModelKeys(served.model).live(run.request.request_id), "until")
        assert kept[0] is not None
        assert not run.cancelled.is_set()


def test_a_drain_lets_answers_finish_in_time(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    may_end = threading.Event()

    def end_when_told(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Begun")
        assert may_end.wait(WAIT_S)
        yield run.say(" and done", finish=FinishReason.STOP)
        yield run.end()

    replica.script = end_when_told
    gateway = start_gateway(gateway_drain_s=WAIT_S)
    with connected(gateway.port) as connection:
        connection.sendall(_generation(served, stream=True))
        read_until(connection, b"Begun")
        gateway.server.should_exit = True
        may_end.set()
        events = read_to_the_end(connection)
    assert b" and done" in events
    assert b"error" not in events
    gateway.stop(timeout_s=WAIT_S)


def _wait_for_runs(replica: ScriptedReplica, count: int) -> None:
    with replica.changed:
        assert replica.changed.wait_for(lambda: len(replica.runs) >= count, WAIT_S)


def _queue(keys: ModelKeys) -> str:
    return keys.queue(PriorityClass.INTERACTIVE)


def test_a_model_that_no_replica_serves_is_told_at_once(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    unserved = served.register("gone")
    served.client.delete(ModelKeys(unserved).serving(served.version.weights_digest))
    gateway = start_gateway()
    body = {"model": unserved, "prompt": "hello", "stream": True}
    response = httpx.post(
        f"http://127.0.0.1:{gateway.port}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {served.key}"},
    )
    assert response.status_code == 503
    assert "No replica serves" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"
    assert served.count_rows(unserved) == 0
