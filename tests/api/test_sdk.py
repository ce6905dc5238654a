"""The official OpenAI client against a live gateway."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from engine.interface.generation_delta import FinishReason, GenerationDelta
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import Run, ScriptedReplica


def test_a_chat_is_answered(sdk: openai.OpenAI, served: Served, replica: ScriptedReplica) -> None:
    answer = sdk.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == f"{served.model}@v1"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.usage.prompt_tokens == replica.latest().request.num_prompt_tokens
    assert answer._request_id == "req_" + answer.id.removeprefix("chatcmpl-")


def test_a_chat_is_streamed(sdk: openai.OpenAI, served: Served, replica: ScriptedReplica) -> None:
    chunks = _stream(sdk, served)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hello", " world", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_if_asked_for(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    chunks = _stream(sdk, served, stream_options={"include_usage": True})
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_choices_are_told_apart_by_index(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    chunks = _stream(sdk, served, n=3)
    for choice in range(3):
        said = [c.choices[0] for c in chunks if c.choices[0].index == choice]
        assert "".join(c.delta.content or "" for c in said) == "Hello world"
        assert [c.finish_reason for c in said if c.finish_reason] == ["stop"]


def test_raw_prompts_are_continued(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    answer = sdk.completions.create(model=served.model, prompt=["one", "two"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello world", "Hello world"]
    assert replica.latest().request.prompts == (tuple(b"one"), tuple(b"two"))
    replica.forget()
    text = "".join(
        chunk.choices[0].text
        for chunk in sdk.completions.create(model=served.model, prompt=[104, 105], stream=True)
    )
    assert text == "Hello world"
    assert replica.latest().request.prompts == ((104, 105),)


def test_a_request_without_a_seed_gets_one_of_its_own(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    for _ in range(3):
        _stream(sdk, served)
    seeds = {run.request.sampling.seed for run in replica.runs.values()}
    assert len(seeds) == 3
    replica.forget()
    _stream(sdk, served, seed=17)
    assert replica.latest().request.sampling.seed == 17


def test_models_are_listed_by_both_names(sdk: openai.OpenAI, served: Served) -> None:
    names = {model.id for model in sdk.models.list()}
    assert {served.model, f"{served.model}@v1"} <= names
    model = sdk.models.retrieve(f"{served.model}@v1")
    assert model.object == "model"
    assert model.created == int(served.version.created_at.timestamp()) or model.created > 0


@pytest.mark.parametrize(
    ("wrong", "error", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": 1000}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": "none"}, openai.NotFoundError, "model_not_found"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "unsupported_parameter"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_are_raised_as_what_they_are(
    sdk: openai.OpenAI,
    served: Served,
    wrong: dict[str, object],
    error: type[openai.APIStatusError],
    code: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        _stream(sdk, served, **{"stream": stream, **wrong})
    assert caught.value.code == code


def test_a_wrong_key_is_an_authentication_error(live: LiveGateway, served: Served) -> None:
    with (
        openai.OpenAI(base_url=live.url, api_key="hr-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("replica_lost", 503),
        ("request_lost", 503),
        ("server_is_overloaded", 503),
        ("deadline_exceeded", 504),
        ("internal_error", 500),
        ("cancelled", 409),
        ("a code from the future", 500),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_ends_before_a_word_is_told_by_its_status(
    sdk: openai.OpenAI,
    served: Served,
    replica: ScriptedReplica,
    ending: str,
    status: int,
    stream: bool,
) -> None:
    def fail_at_once(run: Run) -> Iterator[GenerationDelta]:
        yield run.end(ending)

    replica.script = fail_at_once
    with pytest.raises(openai.APIStatusError) as caught:
        _stream(sdk, served, stream=stream)
    assert caught.value.status_code == status
    has_retry = "retry-after-ms" in caught.value.response.headers
    assert has_retry == (status == 503)


def test_a_failure_in_mid_stream_raises_and_is_no_clean_end(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    def fail_after_a_word(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Half")
        yield run.end("replica_lost")

    replica.script = fail_after_a_word
    stream = sdk.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    said: list[str | None] = []
    with pytest.raises(openai.APIError) as caught:
        said.extend(chunk.choices[0].delta.content for chunk in stream)
    assert said == ["", "Half"]
    assert caught.value.code == "replica_lost"
    assert caught.value.type == "service_unavailable_error"


def test_what_was_said_before_the_deadline_is_an_answer(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    def miss_the_deadline(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Half")
        yield run.end("deadline_exceeded")

    replica.script = miss_the_deadline
    answer = sdk.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "hi"}],
        extra_headers={"X-Deadline-Ms": "5000"},
    )
    assert answer.choices[0].message.content == "Half"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra is not None
    assert answer.model_extra["x_stop_reason"] == "deadline_exceeded"
    request = replica.latest().request
    assert request.deadline_at - request.arrival == pytest.approx(5)


def test_odd_line_breaks_survive_every_client(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    odd = "a\u2028b\u2029c\u0085d\r\ne\x0b\x1cf\0g data: [DONE]\n\ndata: {} \ufeff é 世界 😀"

    def say_odd_things(run: Run) -> Iterator[GenerationDelta]:
        yield run.say(odd, finish=FinishReason.LENGTH)
        yield run.end()

    replica.script = say_odd_things
    chunks = _stream(sdk, served)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == odd


def _stream(sdk: openai.OpenAI, served: Served, **fields: object) -> list[ChatCompletionChunk]:
    body: dict[str, object] = {
        "model": served.model,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        **fields,
    }
    answer = sdk.chat.completions.create(**body)  # type: ignore[call-overload]  # by name only
    return list(answer)
