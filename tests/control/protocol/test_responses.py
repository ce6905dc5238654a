"""Answers as bytes."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control import errors
from control.protocol.error_object import FACES, ending_of, face_of
from control.protocol.responses import (
    CHAT,
    COMPLETION,
    ChunkEncoder,
    FinishedChoice,
    ReplyHead,
    event,
    to_json,
    whole_reply,
)
from control.registry.model_version import ModelVersion
from engine.interface.errors import InvalidRequest
from engine.interface.generation_delta import FinishReason, Usage

VERSION = ModelVersion("m", "v1", "ab" * 32, "/w", 100, 50, datetime(2030, 1, 1, tzinfo=UTC), True)
USAGE = Usage(3, 4, 2)


@given(st.text())
def test_any_text_is_one_line_for_every_reader_and_comes_back_the_same(text: str) -> None:
    chunk = ChunkEncoder(ReplyHead(CHAT, "1", 2, VERSION), includes_usage=False).text(0, text)
    lines = chunk.decode().splitlines()
    assert len(lines) == 2
    assert lines[1] == ""
    delta = json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]
    assert delta.get("content", "") == text


def test_a_whole_chat_is_these_bytes() -> None:
    head = ReplyHead(CHAT, "id", 7, VERSION)
    assert whole_reply(head, [FinishedChoice(0, "hi", FinishReason.LENGTH)], USAGE) == (
        b'{"id":"chatcmpl-id","object":"chat.completion","created":7,"model":"m@v1",'
        b'"service_tier":"default","system_fingerprint":"fp_abababababab","choices":'
        b'[{"index":0,"message":{"role":"assistant","content":"hi","refusal":null},'
        b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":3,'
        b'"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2},'
        b'"completion_tokens_details":{"reasoning_tokens":0}}}'
    )


def test_a_whole_completion_holds_text() -> None:
    head = ReplyHead(COMPLETION, "id", 7, VERSION)
    choices = [FinishedChoice(n, "x" * n, FinishReason.STOP) for n in range(2)]
    reply = json.loads(whole_reply(head, choices, USAGE, "deadline_exceeded"))
    assert [choice["text"] for choice in reply["choices"]] == ["", "x"]
    assert reply["object"] == "text_completion"
    assert reply["x_stop_reason"] == "deadline_exceeded"


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
@pytest.mark.parametrize("includes_usage", [True, False])
def test_every_chunk_parses_and_has_the_same_head(shape: object, includes_usage: bool) -> None:
    assert shape in (CHAT, COMPLETION)
    head = ReplyHead(CHAT if shape is CHAT else COMPLETION, "id", 7, VERSION)
    encoder = ChunkEncoder(head, includes_usage=includes_usage)
    chunks = [
        encoder.first(1),
        encoder.text(1, "a"),
        encoder.heartbeat(),
        encoder.finish(1, FinishReason.CONTENT_FILTER),
    ]
    parsed = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks if chunk]
    assert all(("usage" in chunk) == includes_usage for chunk in parsed)
    usage = json.loads(encoder.usage(USAGE).removeprefix(b"data: "))
    assert usage["choices"] == []
    for chunk in [*parsed, usage]:
        assert (chunk["id"], chunk["created"], chunk["model"]) == (
            head.shape.id_prefix + "id",
            7,
            "m@v1",
        )


def test_an_event_is_one_data_line_and_a_blank_one() -> None:
    assert event(to_json({"a": "\n"})) == b'data: {"a":"\\n"}\n\n'


def service_errors() -> list[type[errors.ServiceError]]:
    found = [e for e in vars(errors).values() if isinstance(e, type)]
    return [e for e in found if issubclass(e, errors.ServiceError)]


@pytest.mark.parametrize("error", service_errors())
def test_every_service_error_has_a_face(error: type[errors.ServiceError]) -> None:
    face = face_of(error("why", param="p", retry_after_ms=5))
    assert face.body["error"] == {
        "message": "why",
        "type": face.type,
        "param": "p",
        "code": error.code,
    }
    assert 400 <= face.status < 600
    assert error in FACES


def test_an_unexpected_error_says_nothing_of_itself() -> None:
    face = face_of(RuntimeError("SELECT secret"))
    assert face.status == 500
    assert "secret" not in str(face.body)


def test_an_error_about_the_whole_body_names_no_field() -> None:
    assert face_of(InvalidRequest("no", param="")).param is None


@pytest.mark.parametrize("code", [*errors.ENDINGS, "unheard of"])
def test_every_ending_is_an_error(code: str) -> None:
    ending = ending_of(code)
    expected = code if code in errors.ENDINGS else "internal_error"
    assert ending.code == expected
    assert str(ending)
