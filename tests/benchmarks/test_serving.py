"""The client reads any server's stream, and the works count what readers got."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import serving
from benchmarks.completion_client import CompletionFailed, Endpoint, complete
from benchmarks.serving import ServedWork, at_rate, measure, percentile, run
from cli.bench import bench
from cli.errors import CommandFailed

WORK = ServedWork("served", num_requests=6, concurrency=2, prompt=8, output=3, shared=4)

Body = dict[str, object]


@contextmanager
def server(answer: Callable[[Body], bytes]) -> Iterator[tuple[Endpoint, list[Body]]]:
    """A server on threads, which writes `answer` to each request and closes."""
    bodies: list[Body] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.wfile.write(answer(bodies[-1]))

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Endpoint(f"http://127.0.0.1:{listening.server_port}", "model", "key"), bodies
        finally:
            listening.shutdown()
            thread.join()


def stream(*events: object) -> bytes:
    """A chunked answer of these events, a chunk each."""
    said = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in said)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def words(body: Body) -> bytes:
    count = int(str(body["max_tokens"]))
    usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 4}}
    pieces = [{"choices": [{"text": "a"}], "usage": None}] * count
    return stream(*pieces, {"choices": [], "usage": usage})


def test_a_closed_loop_counts_tokens_and_gaps() -> None:
    with server(words) as (endpoint, bodies):
        result = run(endpoint, WORK, random.Random(1))
    assert (result.num_tokens, result.num_failed, result.num_cached_tokens) == (18, 0, 24)
    assert len(result.first_token_ms) == 6
    assert len(result.gaps_ms) == 6 * 2
    assert result.tokens_per_s > 0.0
    beginnings = {tuple(json.loads(json.dumps(body["prompt"]))[:4]) for body in bodies}
    assert len(beginnings) == 1
    assert all(body["ignore_eos"] is True and body["stream"] is True for body in bodies)


def test_an_open_loop_asks_for_everything_too() -> None:
    with server(words) as (endpoint, bodies):
        result = run(endpoint, at_rate(WORK, 10_000.0), random.Random(1))
    assert len(bodies) == 6
    assert result.num_tokens == 18


def test_medians_are_told_in_words() -> None:
    with server(words) as (endpoint, _):
        served = measure(endpoint, WORK, 2)
    assert served.medians()["failed"] == 0.0
    for word in ("6 requests, 2 at once", "4 of them common", "TTFT", "ITL"):
        assert word in served.table()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n{}", "401"),
        (stream({"choices": [{"text": "a"}]}), "3 tokens were asked for, 1 came"),
        (stream({"error": {"message": "the replica is lost"}}), "replica is lost"),
        (stream(), "no text"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(answer: bytes, reason: str) -> None:
    with (
        server(lambda body: answer) as (endpoint, _),
        pytest.raises(CompletionFailed, match=reason),
    ):
        asyncio.run(complete(endpoint, [1, 2], 3))


def test_failures_are_counted_unless_all_fail() -> None:
    turns = iter([True, False] * 3)
    with server(lambda body: words(body) if next(turns) else stream()) as (endpoint, _):
        result = run(endpoint, WORK, random.Random(1))
    assert (result.num_failed, result.num_tokens) == (3, 9)
    with server(lambda body: stream()) as (endpoint, _), pytest.raises(CompletionFailed):
        run(endpoint, WORK, random.Random(1))


@pytest.mark.parametrize(
    "url", ["http://example.com:80", "https://127.0.0.1:1", "http://localhost"]
)
def test_nothing_but_loopback_is_loaded(url: str) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        asyncio.run(complete(Endpoint(url, "model"), [1], 1))


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([5.0], 0.95) == 5.0
    assert serving.WORKS["prefix"].shared == 768


def test_the_command_measures_any_server_and_keeps_the_results(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    with server(words) as (endpoint, bodies):
        asked = ["serving", "--base-url", endpoint.base_url, "--model-name", "model"]
        asked += ["--work", "prefix", "--runs", "1", "--json", str(file)]
        result = CliRunner().invoke(bench, asked)
    assert result.exit_code == 0, result.output
    assert "768 of them common" in result.output
    assert len(bodies) == 2 + 32
    (served,) = json.loads(file.read_text())["results"]
    assert served["runs"][0]["cached_tokens"] == 32 * 4


@pytest.mark.parametrize(
    ("url", "work", "reason"),
    [("http://example.com", "served", "loopback"), ("http://127.0.0.1:1", "tea", "--work tea")],
)
def test_a_command_that_cannot_be_done_says_why(url: str, work: str, reason: str) -> None:
    asked = ["serving", "--base-url", url, "--model-name", "model", "--work", work]
    result = CliRunner().invoke(bench, asked)
    assert isinstance(result.exception, CommandFailed)
    assert reason in str(result.exception)
