"""What arrives before the app: targets, framing, headers, lengths."""

import json
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from api import http_protocol
from api.http_protocol import GatewayProtocol
from engine.interface.generation_delta import FinishReason, GenerationDelta
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.raw_http import (
    connected,
    exchange,
    read_answer,
    read_to_the_end,
    read_until,
    request,
)
from tests.api.scripted_replica import Run, ScriptedReplica


@pytest.mark.parametrize(
    "target",
    [
        "/v1/chat/completions",
        "http://gateway/v1/chat/completions",
        "http://x/health/live?/v1/chat/completions",
        "//v1/chat/completions",
        "//health/live/../../v1/chat/completions",
        "/v1/..%2fchat/completions",
        "/v1/chat/completions?x=/health/live",
        "/health/live/../../v1/chat/completions",
        "/health/live%2f..%2f..%2fv1/chat/completions",
        "/v1/chat/completions/",
        "/v1/chat//completions",
        "/V1/chat/completions",
        "/admin/keys",
        "//admin/keys",
        "/health/live/../../admin/keys",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/metrics",
        "/",
        "v1/chat/completions",
        "*",
        "",
    ],
)
@pytest.mark.parametrize(
    "host", ["gateway", "x/health/live?", "a/?x=", "a#", "", "localhost:1/health/live"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_target_and_no_host_leads_around_the_key(
    live: LiveGateway, target: str, host: str, method: str
) -> None:
    if target == "http://x/health/live?/v1/chat/completions" and method == "GET":
        return  # This is a request for health, spelled out.
    status, answer = exchange(live.port, request(target, method=method, headers={"Host": host}))
    assert status in (400, 401), answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] in ("invalid_api_key", "invalid_http")


def test_health_needs_no_key(live: LiveGateway) -> None:
    status, _ = exchange(live.port, request("/health/live", method="GET"))
    assert status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/docs", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/v1/models/a/b@c", 404, "model_not_found"),
    ],
)
def test_with_a_key_the_router_answers_in_our_shape(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-encoding", "gzip"),
        ("content-encoding", "identity"),
        ("content-type", "text/plain"),
        ("content-type", "application/x-www-form-urlencoded"),
        ("content-type", "application/json; charset=utf-16"),
        ("content-type", ""),
    ],
)
def test_other_media_than_plain_json_are_refused(http: httpx.Client, name: str, value: str) -> None:
    headers = {"content-type": "application/json"} | {name: value}
    answer = http.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_a_charset_of_utf8_is_no_other_media(http: httpx.Client) -> None:
    headers = {"content-type": 'application/json; charset="UTF-8"'}
    answer = http.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.json()["error"]["code"] == "missing_required_parameter"


def test_a_declared_length_over_the_limit_is_refused_before_it_is_sent(
    live: LiveGateway, served: Served
) -> None:
    headers = {"Authorization": f"Bearer {served.key}", "Content-Length": str(5 * 2**20)}
    status, answer = exchange(live.port, request("/v1/completions", headers=headers))
    assert status == 413
    assert b'"code":"request_too_large"' in answer


def test_a_body_without_a_length_is_cut_at_the_limit(live: LiveGateway, served: Served) -> None:
    head = request(
        "/v1/completions",
        headers={"Authorization": f"Bearer {served.key}", "Transfer-Encoding": "chunked"},
    ).replace(b"Content-Length: 0\r\n", b"")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    status, answer = exchange(live.port, head + chunk * 80)
    assert status == 413
    assert b'"code":"request_too_large"' in answer


def test_strangers_cannot_make_us_read_bodies(live: LiveGateway) -> None:
    headers = {"Content-Length": str(3 * 2**20)}
    status, _ = exchange(live.port, request("/v1/completions", headers=headers))
    assert status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Big": "x" * 1_000_000},
        {"X-Big": "x" * 70_000},
        {f"X-{i}": "y" for i in range(1000)},
        {f"X-{i}": "y" * 1000 for i in range(90)},
        {"X" * 70_000: "y"},
    ],
    ids=["1 MB value", "70 kB value", "1000 headers", "90 large ones", "70 kB name"],
)
def test_a_flood_of_headers_is_refused(live: LiveGateway, headers: dict[str, str]) -> None:
    status, answer = exchange(live.port, request("/health/live", method="GET", headers=headers))
    assert status == 431
    assert b'"code":"headers_too_large"' in answer


def test_a_flood_in_the_target_is_refused(live: LiveGateway) -> None:
    status, _ = exchange(live.port, request("/health/live?" + "x" * 1_000_000, method="GET"))
    assert status == 431


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5x\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b" folded: x\r\n",
        b"X: a\rb\r\n",
        b"X: a\0b\r\n",
        b"NoColon\r\n",
    ],
)
def test_doubtful_framing_is_refused_and_the_socket_closed(
    live: LiveGateway, framing: bytes
) -> None:
    head = b"POST /health/live HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n"
    with connected(live.port) as connection:
        connection.sendall(head + b"5\r\nhello\r\n0\r\n\r\n")
        status, answer = read_answer(connection)
        assert status == 400, answer
        assert b'"code":"invalid_http"' in answer
        assert connection.recv(1) == b""


def test_what_follows_a_short_length_is_refused_and_the_socket_closed(
    live: LiveGateway, served: Served
) -> None:
    headers = {"Authorization": f"Bearer {served.key}", "Content-Length": "2"}
    with connected(live.port) as connection:
        connection.sendall(request("/v1/completions", headers=headers, body=b"{}garbage\r\n\r\n"))
        answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("tail", [b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n", b"G", b"\0"])
def test_what_comes_in_one_piece_behind_a_request_is_not_served(
    live: LiveGateway, tail: bytes
) -> None:
    with connected(live.port) as connection:
        connection.sendall(request("/health/live", method="GET") + tail)
        answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("stray", [b"\r\n", b"\n", b"\r\n\r\n"])
def test_empty_lines_behind_a_body_end_no_connection(live: LiveGateway, stray: bytes) -> None:
    with connected(live.port) as connection:
        for _ in range(3):
            connection.sendall(request("/health/live", method="GET") + stray)
            assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("early", [b"\r\n", b"GET /v1/mod", b"no HTTP\0\r\n\r\n", b"x" * 200_000])
@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_what_comes_behind_a_request_neither_breaks_nor_ends_its_answer(
    live: LiveGateway,
    served: Served,
    replica: ScriptedReplica,
    monkeypatch: pytest.MonkeyPatch,
    early: bytes,
    is_in_one_piece: bool,
) -> None:
    script, may_end = _ends_when_told()
    replica.script = script
    body = json.dumps({"model": served.model, "prompt": "x", "stream": True}).encode()
    key = {"Authorization": f"Bearer {served.key}"}
    sent = request("/v1/completions", headers=key, body=body)
    heard = _tell_when_heard(monkeypatch, early[:2])
    with connected(live.port) as connection:
        connection.sendall(sent + (early if is_in_one_piece else b""))
        answer = read_until(connection, b"Begun")
        if not is_in_one_piece:
            with monkeypatch.context() as impatient:
                impatient.setattr(http_protocol, "HEADER_LIMIT_S", 0.0)
                connection.sendall(early)
                assert heard.wait(10)
        may_end.set()
        answer += read_until(connection, b"0\r\n\r\n")
    stream, end, _ = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert end
    assert stream.count(b"HTTP/1.1 ") == 1


def test_a_request_that_comes_while_an_answer_is_under_way_is_answered_after_it(
    live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    script, may_end = _ends_when_told()
    replica.script = script
    body = json.dumps({"model": served.model, "prompt": "x", "stream": True}).encode()
    key = {"Authorization": f"Bearer {served.key}"}
    with connected(live.port) as connection:
        connection.sendall(request("/v1/completions", headers=key, body=body))
        read_until(connection, b"Begun")
        connection.sendall(request("/v1/models", method="GET", headers={"Connection": "close"}))
        may_end.set()
        answer = read_to_the_end(connection)
    stream, _, other = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b" and done" in stream
    assert other.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("trailer", ["Authorization: Bearer KEY", "X-Request-Id: mine"])
def test_trailers_are_no_headers(
    live: LiveGateway, served: Served, replica: ScriptedReplica, trailer: str
) -> None:
    body = json.dumps({"model": served.model, "prompt": "x"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    has_key = "KEY" not in trailer
    if has_key:
        head += f"Authorization: Bearer {served.key}\r\n".encode()
    last = f"0\r\n{trailer.replace('KEY', served.key)}\r\n\r\n".encode()
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    # In one piece: the app starts when all of it has been parsed.
    message = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + last
    status, answer = exchange(live.port, message)
    assert status == (200 if has_key else 401)
    assert b"x-client-request-id" not in answer


@pytest.mark.parametrize("trailers", [b"X: " + b"y" * 1_000_000, b"X: y\r\n" * 1000])
def test_a_flood_of_trailers_is_refused(live: LiveGateway, served: Served, trailers: bytes) -> None:
    head = request(
        "/v1/completions",
        headers={"Authorization": f"Bearer {served.key}", "Transfer-Encoding": "chunked"},
    ).replace(b"Content-Length: 0\r\n", b"")
    status, answer = exchange(live.port, head + b"2\r\n{}\r\n0\r\n" + trailers)
    assert status == 431
    assert b'"code":"headers_too_large"' in answer


@pytest.mark.parametrize(
    ("version", "hosts", "expected"),
    [
        ("1.1", [], 400),
        ("1.1", ["a", "b"], 400),
        ("1.1", ["a", "a"], 400),
        ("1.0", ["a", "b"], 400),
        ("1.1", ["a/b"], 400),
        ("1.1", ["a@b"], 400),
        ("1.1", ["a b"], 400),
        ("1.1", ["a:b"], 400),
        ("1.0", [], 200),
        ("1.1", [""], 200),
        ("1.1", ["my_gateway.example:8000"], 200),
        ("1.1", ["[::1]:8000"], 200),
    ],
)
def test_a_request_names_one_host(
    live: LiveGateway, version: str, hosts: list[str], expected: int
) -> None:
    lines = "".join(f"Host: {host}\r\n" for host in hosts)
    status, _ = exchange(live.port, f"GET /health/live HTTP/{version}\r\n{lines}\r\n".encode())
    assert status == expected


def test_a_body_that_breaks_after_its_answer_is_not_answered_twice(live: LiveGateway) -> None:
    head = request("/v1/completions", headers={"Transfer-Encoding": "chunked"}).replace(
        b"Content-Length: 0\r\n", b""
    )
    with connected(live.port) as connection:
        connection.sendall(head)
        assert read_answer(connection)[0] == 401
        connection.sendall(b"no chunk\r\n")
        assert read_to_the_end(connection) == b""


def test_a_kept_connection_serves_again_after_an_error(
    live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    key = {"Authorization": f"Bearer {served.key}"}
    body = json.dumps({"model": served.model, "prompt": "x"}).encode()
    with connected(live.port) as connection:
        for content, expected in ((b"{", 400), (body, 200), (b"[]", 400), (body, 200)):
            connection.sendall(request("/v1/completions", headers=key, body=content))
            assert read_answer(connection)[0] == expected


def test_our_id_and_not_the_callers_names_a_request(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    body = {"model": served.model, "prompt": "x"}
    theirs = [
        http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}) for _ in range(2)
    ]
    ids = {answer.headers["x-request-id"] for answer in theirs}
    assert len(ids) == 2
    assert ids == {f"req_{request_id}" for request_id in replica.runs}
    assert {answer.headers["x-client-request-id"] for answer in theirs} == {"mine"}


@pytest.mark.parametrize("value", [b"a" * 129, b"a b", "é".encode(), b"a\tb", b'"'])
def test_an_unsafe_id_of_a_caller_is_not_said_back(http: httpx.Client, value: bytes) -> None:
    answer = http.get("/health/live", headers={b"X-Request-Id": value})
    assert "x-client-request-id" not in answer.headers


def test_expect_continue_is_answered_before_the_body(
    live: LiveGateway, served: Served, replica: ScriptedReplica
) -> None:
    body = json.dumps({"model": served.model, "prompt": "x"}).encode()
    headers = {"Authorization": f"Bearer {served.key}", "Expect": "100-continue"}
    with connected(live.port) as connection:
        connection.sendall(request("/v1/completions", headers=headers, body=body)[: -len(body)])
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert read_answer(connection)[0] == 200


def test_the_kernel_gives_up_on_peers_that_are_gone(live: LiveGateway) -> None:
    with connected(live.port) as connection:
        connection.sendall(request("/health/live", method="GET"))
        assert read_answer(connection)[0] == 200
        (server_side,) = [
            protocol.transport.get_extra_info("socket")
            for protocol in live.server.server_state.connections
            if protocol.transport.get_extra_info("peername") == connection.getsockname()
        ]
        assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: "])
def test_headers_that_do_not_come_whole_are_not_waited_for(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_LIMIT_S", 0.1)
    with connected(live.port) as connection:
        connection.sendall(sent)
        assert read_to_the_end(connection) == b""


def test_a_second_request_must_come_whole_too(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_LIMIT_S", 0.1)
    with connected(live.port) as connection:
        connection.sendall(request("/health/live", method="GET"))
        assert read_answer(connection)[0] == 200
        connection.sendall(b"GET /health")
        assert read_to_the_end(connection) == b""


def test_a_body_that_trickles_is_not_waited_for(
    live: LiveGateway, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_WINDOW_S", 0.1)
    headers = {"Authorization": f"Bearer {served.key}", "Content-Length": "1000"}
    with connected(live.port) as connection:
        connection.sendall(request("/v1/completions", headers=headers, body=b"{"))
        assert read_to_the_end(connection) == b""


def test_an_unread_body_is_not_thrown_away_for_ever(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DISCARDED_BYTES", 1000)
    headers = {"Content-Length": str(2**20)}
    with connected(live.port) as connection:
        connection.sendall(request("/v1/completions", headers=headers))
        assert read_answer(connection)[0] == 401
        with pytest.raises(OSError, match=r"reset|Broken"):
            connection.sendall(b" " * 10_000_000)


def _ends_when_told() -> tuple[Callable[[Run], Iterator[GenerationDelta]], threading.Event]:
    """A script, and what tells it to end."""
    may_end = threading.Event()

    def script(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Begun")
        assert may_end.wait(10)
        yield run.say(" and done", finish=FinishReason.STOP)
        yield run.end()

    return script, may_end


def _tell_when_heard(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> threading.Event:
    """Set once such bytes were taken in, and what was due at once after them was done."""
    heard = threading.Event()
    take_in = GatewayProtocol.data_received

    def take_in_and_tell(protocol: GatewayProtocol, data: bytes) -> None:
        take_in(protocol, data)
        if data.startswith(beginning):
            protocol.loop.call_soon(protocol.loop.call_soon, heard.set)

    monkeypatch.setattr(GatewayProtocol, "data_received", take_in_and_tell)
    return heard
