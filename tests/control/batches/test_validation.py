"""What an input file may look like, and what is said of one that may not."""

import json
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.batches.validation import (
    MAX_FAULTS,
    MAX_LINE_BYTES,
    MAX_LINES,
    Verdict,
    check_input,
    read_lines,
    split_lines,
)
from control.registry.model_version import ModelVersion, Registry

ENDPOINT = "/v1/chat/completions"
REGISTRY = Registry.of(
    ModelVersion(name, "v1", "0" * 64, "/nowhere", 100, 10, datetime.now(UTC), is_in_force=True)
    for name in ("small", "large")
)


def line(custom_id: object = "a", **changes: object) -> bytes:
    """One good line, but for the changes."""
    fields: dict[str, object] = {
        "custom_id": custom_id,
        "method": "POST",
        "url": ENDPOINT,
        "body": {"model": "small", "messages": []},
    }
    return json.dumps(fields | changes, ensure_ascii=False).encode() + b"\n"


async def chunked(content: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    """The content as a store gives it."""
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def check(content: bytes, size: int = 1 << 16) -> Verdict:
    """The verdict on a file."""
    return await check_input(chunked(content, size), ENDPOINT, REGISTRY)


def told(verdict: Verdict) -> list[tuple[int | None, str]]:
    """Line and code of each fault."""
    return [(fault.line, fault.code) for fault in verdict.faults]


async def test_a_good_file_runs_on_the_pinned_model() -> None:
    assert await check(line("a") + line("b")) == Verdict((), "small@v1")


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\r\n  \n"])
async def test_a_file_without_requests_is_empty(content: bytes) -> None:
    assert told(await check(content)) == [(None, "empty_file")]


async def test_blank_lines_count_and_windows_endings_and_a_last_line_without_end_are_fine() -> None:
    content = line("a") + b"\n\r\n" + line("b").replace(b"\n", b"\r\n") + line("c").rstrip()
    assert not (await check(content)).faults
    lines = [each async for each in read_lines(chunked(content), ENDPOINT)]
    assert [(each.number, each.custom_id) for each in lines] == [(1, "a"), (4, "b"), (5, "c")]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"\xef\xbb\xbf" + line("b"), "invalid_json_line"),
        (line("b").decode().encode("utf-16-le"), "invalid_json_line"),
        (b"\x1f\x8b\x08\x00\x00\n", "invalid_json_line"),
        (b"[]\n", "invalid_json_line"),
        (b'{"custom_id": "b"} trailing\n', "invalid_json_line"),
        (b'{"custom_id": NaN}\n', "invalid_json_line"),
        (b'{"custom_id": "\\ud800", "method": "POST"}\n', "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "invalid_json_line"),
        (line("b", body=None), "missing_required_parameter"),
        (line("b", body={"messages": []}), "missing_required_parameter"),
        (line("b", body={"model": 3}), "missing_required_parameter"),
        (line("b", body="text"), "invalid_value"),
        (line(None), "missing_required_parameter"),
        (line(7), "invalid_value"),
        (line(""), "invalid_value"),
        (line("x" * 513), "invalid_value"),
        (line("a\0b"), "invalid_value"),
        (line("a"), "duplicate_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", method="post"), "invalid_method"),
        (line("b", url="/v1/completions"), "url_mismatch"),
        (line("b", url="/v1/batches"), "url_mismatch"),
        (line("b", body={"model": "unknown"}), "model_not_found"),
        (line("b", body={"model": "large"}), "mixed_models"),
        (line("b", body={"model": "small", "pad": "x" * MAX_LINE_BYTES}), "request_too_large"),
    ],
)
async def test_a_bad_line_is_named_by_number_and_code(bad: bytes, code: str) -> None:
    verdict = await check(line("a") + bad + line("z"))
    assert (2, code) in told(verdict)
    assert verdict.model is None
    assert all(len(fault.message) < 200 for fault in verdict.faults)


@pytest.mark.parametrize(
    "custom_id", [" a ", "A", "é", "e\u0301", "\u0430", "\u2028", "../../x", "a\tb", "x" * 512]
)
async def test_a_custom_id_is_kept_exactly(custom_id: str) -> None:
    content = line("a") + line(custom_id)
    assert not (await check(content)).faults
    lines = [each async for each in read_lines(chunked(content, 7), ENDPOINT)]
    assert lines[1].custom_id == custom_id


async def test_a_body_is_kept_as_it_was_sent() -> None:
    body = b'{"model": "small",  "temperature": 1.0, "seed": 12345678901234567890, "x": "\\u0041"}'
    content = b'{"custom_id":"a","method":"POST","url":"%s","body":%s}\n' % (
        ENDPOINT.encode(),
        body,
    )
    lines = [each async for each in read_lines(chunked(content), ENDPOINT)]
    assert lines[0].body == body


async def test_at_most_a_hundred_faults_are_listed() -> None:
    verdict = await check(b"nothing\n" * 1000)
    assert len(verdict.faults) == MAX_FAULTS


async def test_the_limit_of_requests_is_exact_and_a_million_lines_cost_little_memory() -> None:
    async def many(count: int) -> AsyncIterator[bytes]:
        for start in range(0, count, 1000):
            numbers = range(start, min(start + 1000, count))
            yield b"".join(line(f"number {number}") for number in numbers)

    assert not (await check_input(many(MAX_LINES), ENDPOINT, REGISTRY)).faults
    tracemalloc.start()
    verdict = await check_input(many(1_000_000), ENDPOINT, REGISTRY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told(verdict) == [(None, "too_many_requests")]
    assert peak < 32 * 2**20


async def test_one_endless_line_costs_little_memory() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield line("a")
        for _ in range(200):
            yield b"x" * 2**18
        yield b"\n" + line("c")

    tracemalloc.start()
    verdict = await check_input(endless(), ENDPOINT, REGISTRY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told(verdict) == [(2, "request_too_large")]
    assert peak < 32 * 2**20


@given(st.lists(st.binary(max_size=20)), st.integers(1, 9))
async def test_lines_do_not_depend_on_how_the_bytes_arrive(
    pieces: Iterable[bytes], size: int
) -> None:
    content = b"\n".join(pieces)
    lines = [text async for _, text in split_lines(chunked(content, size))]
    expected = content.split(b"\n")
    assert lines == (expected if expected[-1] else expected[:-1])
