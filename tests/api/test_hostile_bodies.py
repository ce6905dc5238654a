"""Bodies from people who mean no good: each gets its 400, quickly, in our shape, and no work."""

import json
import time

import httpx
import pytest

from engine.interface.generation_delta import FinishReason
from tests.api.conftest import MAX_MODEL_LEN, MAX_OUTPUT, Served
from tests.api.scripted_replica import Run, ScriptedReplica

Case = tuple[dict[str, object], str, str]

BOTH: list[Case] = [
    ({"n": 0}, "invalid_value", "n"),
    ({"n": -1}, "invalid_value", "n"),
    ({"n": 9}, "invalid_value", "n"),
    ({"n": 10**9}, "invalid_value", "n"),
    ({"n": 2**63}, "invalid_value", "n"),
    ({"n": 10**30}, "invalid_value", "n"),
    ({"n": 1.0}, "invalid_value", "n"),
    ({"n": True}, "invalid_value", "n"),
    ({"n": "1"}, "invalid_value", "n"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
    ({"max_tokens": "10"}, "invalid_value", "max_tokens"),
    ({"max_tokens": True}, "invalid_value", "max_tokens"),
    ({"max_tokens": 2**31}, "invalid_value", "max_tokens"),
    ({"max_tokens": 2**63}, "invalid_value", "max_tokens"),
    ({"max_tokens": MAX_OUTPUT + 1}, "invalid_value", "max_tokens"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"temperature": -0.0}, "invalid_value", "temperature"),
    ({"temperature": 1e-320}, "invalid_value", "temperature"),
    ({"top_p": -0.1}, "invalid_value", "top_p"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"min_p": 1.1}, "invalid_value", "min_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.0}, "invalid_value", "top_k"),
    ({"seed": -1}, "invalid_value", "seed"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": 10**20}, "invalid_value", "seed"),
    ({"seed": "1"}, "invalid_value", "seed"),
    ({"seed": 1.0}, "invalid_value", "seed"),
    ({"min_tokens": 6, "max_tokens": 5}, "invalid_value", "min_tokens"),
    ({"min_tokens": 10**6}, "invalid_value", "min_tokens"),
    ({"stop": ["a"] * 5}, "invalid_value", "stop"),
    ({"stop": ["a"] * 10_000}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": "x" * 100_000}, "invalid_value", "stop"),
    ({"stop": ["a", 1]}, "invalid_value", "stop[1]"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [2**63]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": ["a"] * 500_000}, "invalid_value", "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 100_000}, "invalid_value", "stop_token_ids"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
    ({"frequency_penalty": "1"}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": -1}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 1e-9}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 1e9}, "invalid_value", "repetition_penalty"),
    ({"logit_bias": []}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": True}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": -0.0}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"01": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"\u0661": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"259": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(2**63): 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(i): 5 for i in range(100_000)}}, "invalid_value", "logit_bias"),
    ({"logprobs": 10**6}, "invalid_value", "logprobs"),
    ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": True}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"skip_special_tokens": 0}, "invalid_value", "skip_special_tokens"),
    ({"include_stop_str_in_output": "x"}, "invalid_value", "include_stop_str_in_output"),
    ({"return_token_ids": 1}, "invalid_value", "return_token_ids"),
    ({"return_tokens_as_token_ids": 1}, "invalid_value", "return_tokens_as_token_ids"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "invalid_value", "truncate_prompt_tokens"),
    ({"ignore_eos": 1}, "invalid_value", "ignore_eos"),
    ({"bad_words": ["x"]}, "unsupported_parameter", "bad_words"),
    ({"allowed_token_ids": [1]}, "unsupported_parameter", "allowed_token_ids"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"length_penalty": 2.0}, "unsupported_parameter", "length_penalty"),
    ({"response_format": {"type": "grammar"}}, "invalid_value", "response_format.type"),
    ({"metadata": {"a": 1}}, "invalid_value", "metadata.a"),
    ({"metadata": {"a": "\0"}}, "invalid_value", "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "invalid_value", "metadata.a"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "invalid_value", "metadata"),
    ({"metadata": {str(i): 0 for i in range(100_000)}}, "invalid_value", "metadata"),
    ({"user": 5}, "invalid_value", "user"),
    ({"user": "a\0"}, "invalid_value", "user"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, "invalid_value", "stream_options"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"model": 7}, "invalid_value", "model"),
    ({"surprise": None}, "unsupported_parameter", "surprise"),
    ({"sürprise\n": 1}, "unsupported_parameter", "s\\xfcrprise\\x0a"),
    ({"x" * 70_000: 1}, "unsupported_parameter", "x" * 64),
]

CHAT: list[Case] = [
    ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"logprobs": 1}, "invalid_value", "logprobs"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"top_logprobs": 5}, "invalid_value", "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 5}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1.0}, "invalid_value", "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"a": 1}}, "unsupported_parameter", "chat_template_kwargs"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"service_tier": "gold"}, "invalid_value", "service_tier"),
    ({"safety_identifier": "x" * 65}, "invalid_value", "safety_identifier"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": None}, "invalid_value", "messages"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "SYSTEM", "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "", "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": None, "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": 1, "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": ""}]}, "unsupported_parameter", "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio", "text": ""}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": "", "name": "x" * 1_000_000}]},
        "invalid_value",
        "messages[0].name",
    ),
]

LEGACY: list[Case] = [
    ({"logprobs": -1}, "invalid_value", "logprobs"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": 21, "echo": True}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
    ({"echo": 1}, "invalid_value", "echo"),
    (
        {"echo": True, "truncate_prompt_tokens": 5},
        "unsupported_parameter",
        "truncate_prompt_tokens",
    ),
    ({"prompt": None}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": [[[1]]]}, "invalid_value", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_value", "prompt"),
    ({"prompt": [True]}, "invalid_value", "prompt"),
    ({"prompt": [1.0]}, "invalid_value", "prompt"),
    ({"prompt": [-1]}, "invalid_value", "prompt"),
    ({"prompt": [10**6]}, "invalid_value", "prompt"),
    ({"prompt": [2**63]}, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 33}, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 8, "n": 5}, "invalid_value", "n"),
    ({"prompt": [1] * 1_000_000}, "context_length_exceeded", "prompt"),
    ({"prompt": "x" * 3_000_000}, "context_length_exceeded", "prompt"),
    ({"prompt": "x" * MAX_MODEL_LEN}, "context_length_exceeded", "prompt"),
    ({"best_of": 0}, "invalid_value", "best_of"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
]


def _named(cases: list[Case], path: str) -> list[object]:
    return [
        pytest.param(path, (fields, code, param), id=f"{path[4:8]} {str(fields)[:50]!a}")
        for fields, code, param in cases
    ]


@pytest.mark.parametrize(
    ("path", "case"),
    _named(BOTH + CHAT, "/v1/chat/completions") + _named(BOTH + LEGACY, "/v1/completions"),
)
def test_a_bad_value_is_refused_by_name(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    path: str,
    case: Case,
) -> None:
    fields, code, param = case
    is_chat = path == "/v1/chat/completions"
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    _expect(http.post(path, json={"model": served.model, **prompt, **fields}), 400, code, param)
    assert not replica.runs


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'\xef\xbb\xbf{"model":"m"}', "invalid_json"),
        ('{"model":"m"}'.encode("utf-16"), "invalid_json"),
        (b'{"model":"\xff"}', "invalid_json"),
        (b'{"model":"\\ud800"}', "invalid_json"),
        (b'{"model":"\xed\xa0\x80"}', "invalid_json"),
        (b'{"temperature":NaN}', "invalid_json"),
        (b'{"temperature":Infinity}', "invalid_json"),
        (b'{"temperature":-Infinity}', "invalid_json"),
        (b'{"temperature":1e999}', "invalid_value"),
        (b'{"logit_bias":{"1":1e999}}', "invalid_value"),
        (b'{"n":' + b"9" * 5000 + b"}", "invalid_value"),
        (b'{"model":"m"} x', "invalid_json"),
        (b'{"model":"m"}{"model":"m"}', "invalid_json"),
        (b'{"model":"m"} // x', "invalid_json"),
        (b'{"model":"m",}', "invalid_json"),
        (b"{'model':'m'}", "invalid_json"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_no_json_object_is_refused(
    http: httpx.Client, path: str, body: bytes, code: str
) -> None:
    headers = {"content-type": "application/json"}
    _expect(http.post(path, content=body, headers=headers), 400, code, None)


def test_of_equal_keys_the_last_wins(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    body = f'{{"model":"none","prompt":"a","prompt":"bc","model":"{served.model}"}}'
    answer = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    assert replica.latest().prompt == "bc"


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": None},
        {"response_format": {"type": "text"}, "n": None, "seed": 0, "echo": False},
        {"temperature": 0, "top_p": 0, "top_k": -1, "min_p": 0, "min_tokens": 0},
        {"temperature": 1e-12, "top_p": 1e-6, "top_k": 10**9, "user": "x" * 64},
        {"stop": ["a", "a", "\ufeff", "\0"], "stop_token_ids": [], "ignore_eos": True},
        {"stream": False, "stream_options": None, "metadata": {}, "repetition_penalty": 1},
    ],
)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "a", "best_of": 1, "suffix": None, "logprobs": None}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "logprobs": False,
                "tools": [],
                "tool_choice": "auto",
                "store": False,
                "service_tier": "flex",
                "max_tokens": 5,
                "max_completion_tokens": 5,
            },
        ),
    ],
)
def test_values_that_change_nothing_are_accepted(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    path: str,
    prompt: dict[str, object],
    fields: dict[str, object],
) -> None:
    body = {"model": served.model, **prompt, **fields}
    if fields.get("n", 1) is None:
        body.pop("best_of", None)
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if "service_tier" in prompt:
        assert answer.json()["service_tier"] == "default"


def test_sampling_reaches_the_engine_as_asked(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0,
        "top_k": 10**9,
        "min_tokens": 2,
        "max_tokens": 7,
        "stop": "\n",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "seed": 2**63 - 1,
        "n": 2,
    }
    http.post("/v1/completions", json={"model": served.model, "prompt": "abc", **fields})
    run = replica.latest()
    sampling = run.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.0, 259)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.n) == (2, 7, 2)
    assert (sampling.stop, sampling.stop_token_ids) == (("\n",), (3,))
    assert sampling.ignore_eos is True
    assert sampling.seed == 2**63 - 1
    assert run.request.prompts == ((97, 98, 99),)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"),
    [
        (MAX_MODEL_LEN, 1, 400),
        (MAX_MODEL_LEN - 1, 1, 200),
        (MAX_MODEL_LEN - 1, 2, 400),
        (MAX_MODEL_LEN - 1, None, 200),
        (MAX_MODEL_LEN, None, 400),
    ],
)
def test_the_window_holds_prompt_and_output_exactly(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    num_prompt: int,
    max_tokens: int | None,
    status: int,
) -> None:
    body = {"model": served.model, "prompt": [1] * num_prompt, "max_tokens": max_tokens}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        message = answer.json()["error"]["message"]
        assert str(MAX_MODEL_LEN) in message
        assert str(num_prompt) in message


def test_an_output_limit_is_filled_in(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    messages = [{"role": "user", "content": "x"}]
    http.post("/v1/chat/completions", json={"model": served.model, "messages": messages})
    assert replica.latest().request.sampling.max_tokens == MAX_OUTPUT
    replica.forget()
    http.post("/v1/completions", json={"model": served.model, "prompt": "x"})
    assert replica.latest().request.sampling.max_tokens == 16
    replica.forget()
    http.post("/v1/completions", json={"model": served.model, "prompt": [1] * 250})
    assert replica.latest().request.sampling.max_tokens == MAX_MODEL_LEN - 250


def test_control_tokens_in_user_text_stay_text(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    http.post("/v1/chat/completions", json={"model": served.model, "messages": messages})
    run = replica.latest()
    assert run.request.prompts[0].count(258) == 1  # the template's own
    assert "<|im_end|>" in run.prompt


def test_an_answer_of_ours_can_be_sent_back(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    messages: list[object] = [{"role": "user", "content": "x", "name": "me"}]
    body = {"model": served.model, "messages": messages}
    first = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    messages += [first, {"role": "developer", "content": "y"}]
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "", "99999999999", "3600001", "٣"])
def test_a_deadline_is_a_number_of_milliseconds(
    http: httpx.Client, served: Served, value: str
) -> None:
    body = {"model": served.model, "prompt": "x"}
    headers = {b"X-Deadline-Ms": value.encode()}
    answer = http.post("/v1/completions", json=body, headers=headers)
    _expect(answer, 400, "invalid_value", "x-deadline-ms")


def test_an_unknown_model_is_named_escaped(http: httpx.Client) -> None:
    name = "<b>\n\u202e" + "x" * 1000
    answer = http.post("/v1/completions", json={"model": name, "prompt": "x"})
    _expect(answer, 404, "model_not_found", "model")
    assert "\\n\\u202e" in answer.json()["error"]["message"]
    assert len(answer.text) < 400


@pytest.mark.parametrize("stream", [True, False])
def test_the_same_words_come_out_of_ugly_numbers_of_choices(
    http: httpx.Client, served: Served, replica: ScriptedReplica, stream: bool
) -> None:
    def shout(run: Run) -> object:
        for choice in range(run.request.num_choices):
            yield run.say(str(choice), choice=choice, finish=FinishReason.LENGTH)
        yield run.end()

    replica.script = shout  # type: ignore[assignment]  # a generator
    body = {"model": served.model, "prompt": ["a"] * 4, "n": 8, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if not stream:
        choices = answer.json()["choices"]
        assert [(c["index"], c["text"]) for c in choices] == [(i, str(i)) for i in range(32)]


def _expect(answer: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert answer.status_code == status, answer.text[:500]
    error = json.loads(answer.text)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")


def test_refusing_takes_no_time(http: httpx.Client, served: Served) -> None:
    body = {"model": served.model, "prompt": "x", "n": 10**30}
    took = []
    for _ in range(5):
        started = time.monotonic()
        http.post("/v1/completions", json=body)
        took.append(time.monotonic() - started)
    assert min(took) < 0.05
