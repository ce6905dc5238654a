"""The bytes of a stream, exactly."""

import json
from collections.abc import Callable, Iterator

import httpx

from engine.interface.generation_delta import FinishReason, GenerationDelta
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import Run, ScriptedReplica


def test_a_chat_stream_is_these_bytes(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    answer = _post(http, served, "chat/completions", {"messages": _MESSAGES})
    run = replica.latest()
    start = _start(answer, served, run, "chatcmpl-", "chat.completion.chunk")
    end = ',"logprobs":null,"finish_reason":'
    assert answer.text == (
        f'{start}[{{"index":0,"delta":{{"role":"assistant","content":""}}{end}null}}]}}\n\n'
        f'{start}[{{"index":0,"delta":{{"content":"Hello"}}{end}null}}]}}\n\n'
        f'{start}[{{"index":0,"delta":{{"content":" world"}}{end}null}}]}}\n\n'
        f'{start}[{{"index":0,"delta":{{}}{end}"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_stream_with_usage_is_these_bytes(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    options = {"stream_options": {"include_usage": True}}
    answer = _post(http, served, "completions", {"prompt": "hi", **options})
    start = _start(answer, served, replica.latest(), "cmpl-", "text_completion")
    end = ',"logprobs":null,"finish_reason":'
    usage = (
        '{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        '"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":0}}'
    )
    assert answer.text == (
        f'{start}[{{"index":0,"text":"Hello"{end}null}}],"usage":null}}\n\n'
        f'{start}[{{"index":0,"text":" world"{end}null}}],"usage":null}}\n\n'
        f'{start}[{{"index":0,"text":""{end}"stop"}}],"usage":null}}\n\n'
        f'{start}[],"usage":{usage}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_an_interrupted_stream_tells_usage_then_the_error_then_done(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    def fail(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Half")
        yield run.end("replica_lost", cached=1)

    replica.script = fail
    options = {"stream_options": {"include_usage": True}}
    answer = _post(http, served, "completions", {"prompt": "hi", **options})
    *_, usage, error, done = _events(answer.text)
    assert json.loads(usage)["choices"] == []
    frame = json.loads(error)
    assert frame["error"]["code"] == "replica_lost"
    assert frame["error"]["param"] is None
    assert frame["x_usage"] == json.loads(usage)["usage"]
    assert frame["x_usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert done == "[DONE]"


def test_every_chunk_may_carry_the_usage_so_far(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}}
    answer = _post(http, served, "completions", {"prompt": "hi", **options})
    chunks = [json.loads(event) for event in _events(answer.text)[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_a_stream_is_marked_as_one(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    answer = _post(http, served, "completions", {"prompt": "hi"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["openai-processing-ms"].isdecimal()
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers
    assert "server" not in answer.headers


def test_silence_is_filled_with_empty_chunks(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    def think_first(run: Run) -> Iterator[GenerationDelta]:
        assert run.cancelled.wait(0.5) is False
        yield run.say("At last", finish=FinishReason.STOP)
        yield run.end()

    replica.script = think_first
    gateway = start_gateway(heartbeat_s=0.1)
    headers = {"authorization": f"Bearer {served.key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}", headers=headers) as client:
        chat = _post(client, served, "chat/completions", {"messages": _MESSAGES})
        completion = _post(client, served, "completions", {"prompt": "hi"})
    deltas = [json.loads(e)["choices"][0]["delta"] for e in _events(chat.text)[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {}
    assert deltas[-2:] == [{"content": "At last"}, {}]
    texts = [json.loads(e)["choices"][0]["text"] for e in _events(completion.text)[:-1]]
    assert texts[:2] == ["", ""]
    assert texts[-2:] == ["At last", ""]


_MESSAGES = [{"role": "user", "content": "hi"}]


def _post(http: httpx.Client, served: Served, path: str, body: dict[str, object]) -> httpx.Response:
    answer = http.post(f"/v1/{path}", json={"model": served.model, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return answer


def _start(answer: httpx.Response, served: Served, run: Run, prefix: str, object_name: str) -> str:
    request_id = run.request.request_id
    assert answer.headers["x-request-id"] == f"req_{request_id}"
    created = json.loads(_events(answer.text)[0])["created"]
    return (
        f'data: {{"id":"{prefix}{request_id}","object":"{object_name}","created":{created},'
        f'"model":"{served.model}@v1","service_tier":"default",'
        f'"system_fingerprint":"fp_{served.version.weights_digest[:12]}","choices":'
    )


def _events(text: str) -> list[str]:
    """The events as the most naive reader sees them: every line that `splitlines` finds."""
    lines = text.splitlines()
    assert set(lines[1::2]) == {""}
    assert all(line.startswith("data: ") for line in lines[::2])
    return [line.removeprefix("data: ") for line in lines[::2]]
