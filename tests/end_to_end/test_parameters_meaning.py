"""Every parameter of a generation request means something: a gateway, a replica, a real model.

Each test would fail if its parameter were ignored. What is refused is in
`tests/api/test_hostile_bodies.py`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from control.identity.keys import create_key
from engine.text.tokenizer import Tokenizer
from tests.api.live_gateway import PEPPER, gateway_settings, live_gateway
from tests.workers.service import Service

Body = dict[str, object]
PROMPT = "The capital of France is"


class Asker:
    """Asks the served demo model; bodies are sent as they are written here."""

    def __init__(self, client: openai.OpenAI, model: str, tokenizer: Tokenizer) -> None:
        self.client = client
        headers = {"authorization": f"Bearer {client.api_key}"}
        self._http = httpx.Client(base_url=str(client.base_url), headers=headers, timeout=60)
        self.model = model
        self.tokenizer = tokenizer

    def complete(self, **fields: object) -> Body:
        """The raw answer of /v1/completions; greedy and of 6 tokens unless told otherwise."""
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **fields}
        return self._post("completions", body)

    def text(self, **fields: object) -> str:
        """The words of the first choice of a completion."""
        return str(choices_of(self.complete(**fields))[0]["text"])

    def chat(self, **fields: object) -> Body:
        """The raw answer of /v1/chat/completions."""
        messages = [{"role": "user", "content": "Say hello in Japanese."}]
        return self._post(
            "chat/completions",
            {"messages": messages, "temperature": 0, "max_tokens": 8, **fields},
        )

    def events(self, path: str, **fields: object) -> list[Body]:
        """The chunks of a stream."""
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **fields}
        if path == "chat/completions":
            body = {**body, "messages": [{"role": "user", "content": "Say hello in Japanese."}]}
            del body["prompt"]
        answer = self._http.post(path, json={"model": self.model, "stream": True, **body})
        lines = answer.text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, path: str, body: Body) -> Body:
        answer = self._http.post(path, json={"model": self.model, **body})
        assert answer.status_code == 200, answer.text
        told: Body = answer.json()
        return told


def choices_of(answer: Body) -> list[Body]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return choices


@pytest.fixture(scope="module")
def ask(
    database_url: str,
    redis_url: str,
    demo_model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Asker]:
    folder = tmp_path_factory.mktemp("unused")
    service = Service(database_url, redis_url, folder, weights=demo_model_folder)
    service.start_dispatcher()
    service.start_replica()
    with service.database.begin() as connection:
        scopes = frozenset({"inference"})
        _, key = create_key(connection, PEPPER, service.tenant.tenant_id, scopes)
    with live_gateway(gateway_settings(database_url, redis_url)) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=60)
        asker = Asker(client, service.model, Tokenizer.from_folder(demo_model_folder))
        yield asker
        client.close()
        asker.close()
    service.close()


def first_token(ask: Asker) -> int:
    """What the model says to the prompt when it is left alone."""
    choice = choices_of(ask.complete(max_tokens=1, return_token_ids=True))[0]
    token_ids = choice["token_ids"]
    assert isinstance(token_ids, list)
    return int(token_ids[0])


def test_a_bias_forbids_or_forces_a_token(ask: Asker) -> None:
    usual = first_token(ask)
    for biases, is_usual in (({str(usual): -100}, False), ({"44": 100}, False), ({}, True)):
        choice = choices_of(ask.complete(logit_bias=biases, return_token_ids=True, max_tokens=1))[0]
        token_ids = choice["token_ids"]
        assert isinstance(token_ids, list)
        assert (token_ids[0] == usual) is is_usual
        assert "44" not in biases or token_ids[0] == 44


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}],
    ids=str,
)
def test_a_penalty_makes_repetition_rarer(ask: Asker, penalty: Body) -> None:
    asked: Body = {"prompt": "la la la la la la", "max_tokens": 16, "return_token_ids": True}
    said = []
    for more in ({}, penalty):
        token_ids = choices_of(ask.complete(**asked, **more))[0]["token_ids"]
        assert isinstance(token_ids, list)
        said.append(len(set(token_ids)))
    assert said[1] > said[0]


WILD: Body = {"temperature": 1.5, "seed": 3, "max_tokens": 12}


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 0}], ids=str
)
def test_what_leaves_one_token_is_greedy(ask: Asker, narrow: Body) -> None:
    greedy = ask.text(max_tokens=12)
    assert ask.text(**WILD) != greedy
    assert ask.text(**{**WILD, **narrow}) == greedy


def test_a_seed_repeats_and_another_does_not(ask: Asker) -> None:
    assert ask.text(**WILD) == ask.text(**WILD)
    assert ask.text(**WILD) != ask.text(**{**WILD, "seed": 4})
    assert ask.text(**{**WILD, "seed": None}) != ask.text(**{**WILD, "seed": None})
    texts = {str(choice["text"]) for choice in choices_of(ask.complete(**{**WILD, "n": 4}))}
    assert len(texts) == 4


def test_what_ends_the_output_ends_it_and_is_shown_on_request(ask: Asker) -> None:
    whole = ask.text()
    word = whole[3:5]
    usual = first_token(ask)
    piece = ask.tokenizer.token_bytes(usual).decode()
    for fields, without in (({"stop": word}, whole[: whole.index(word)]), (
        {"stop_token_ids": [usual]}, "")):  # fmt: skip
        (choice,) = choices_of(ask.complete(**fields))
        assert (choice["text"], choice["finish_reason"]) == (without, "stop")
        shown = ask.text(**fields, include_stop_str_in_output=True)
        assert shown == (without + word if "stop" in fields else piece)
    late = ask.text(stop_token_ids=[usual], min_tokens=3)
    assert len(late) > len(piece)


def test_an_end_token_is_passed_over_and_shown_only_if_asked(ask: Asker) -> None:
    end = min(ask.tokenizer.eos_token_ids)
    forced: Body = {"logit_bias": {str(end): 100}, "max_tokens": 3}
    assert choices_of(ask.complete(**forced))[0]["finish_reason"] == "stop"
    passing = {**forced, "ignore_eos": True}
    (choice,) = choices_of(ask.complete(**passing))
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    name = ask.tokenizer.token_bytes(end).decode()
    assert ask.text(**passing, skip_special_tokens=False) == name * 3


def test_only_the_end_of_a_prompt_is_used(ask: Asker) -> None:
    ids = list(ask.tokenizer.encode_prompt(PROMPT))
    (choice,) = choices_of(ask.complete(truncate_prompt_tokens=2, return_token_ids=True))
    assert choice["prompt_token_ids"] == ids[-2:]
    assert choice["text"] == ask.text(prompt=ids[-2:])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_what_lm_evaluation_harness_needs(
    ask: Asker, n: int, max_tokens: int
) -> None:
    prompts = [list(ask.tokenizer.encode_prompt(text)) for text in (PROMPT, "One two three four")]
    answer = ask.complete(
        prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, seed=1234, n=n
    )
    usage = answer["usage"]
    assert isinstance(usage, dict)
    assert usage["completion_tokens"] == max_tokens * n * 2
    for index, choice in enumerate(choices_of(answer)):
        prompt, logprobs = prompts[index // n], choice["logprobs"]
        assert isinstance(logprobs, dict)
        assert {len(column) for column in logprobs.values()} == {len(prompt) + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert choice["finish_reason"] == "length"
        text = str(choice["text"])
        assert "".join(logprobs["tokens"]) == text
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert text[offset:].startswith(token)
        for logprob, top in list(
            zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        )[1:]:
            assert logprob <= max(top.values()) <= 0
            assert logprob in top.values()


def test_echo_puts_the_prompt_first_in_every_choice(ask: Asker) -> None:
    plain = ask.text()
    for choice in choices_of(ask.complete(echo=True, n=2)):
        assert choice["text"] == PROMPT + plain
        assert choice["logprobs"] is None
    assert ask.text(echo=True, max_tokens=0) == PROMPT
    chunks = [choices_of(event)[0] for event in ask.events("completions", echo=True)]
    assert str(chunks[0]["text"]).startswith(PROMPT)
    assert "".join(str(chunk["text"]) for chunk in chunks) == PROMPT + plain


def test_prompt_logprobs_have_vllms_shape(ask: Asker) -> None:
    ids = list(ask.tokenizer.encode_prompt(PROMPT))
    (choice,) = choices_of(ask.complete(prompt_logprobs=2, max_tokens=1))
    told = choice["prompt_logprobs"]
    assert isinstance(told, list)
    assert told[0] is None
    assert len(told) == len(ids)
    for token_id, entry in zip(ids[1:], told[1:], strict=True):
        own = entry[str(token_id)]
        assert own["decoded_token"] == ask.tokenizer.token_bytes(token_id).decode()
        assert {1, 2} <= {known["rank"] for known in entry.values()}
        assert all(math.isfinite(known["logprob"]) for known in entry.values())
    chat = ask.chat(prompt_logprobs=0, max_tokens=1, return_token_ids=True)
    of_chat, prompt = chat["prompt_logprobs"], chat["prompt_token_ids"]
    assert isinstance(of_chat, list)
    assert isinstance(prompt, list)
    assert len(of_chat) == len(prompt)


def test_tokens_may_be_called_by_their_ids(ask: Asker) -> None:
    asked: Body = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = choices_of(ask.complete(**asked))
    logprobs, token_ids = choice["logprobs"], choice["token_ids"]
    assert isinstance(logprobs, dict)
    assert isinstance(token_ids, list)
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in token_ids]


@pytest.mark.parametrize("fields", [{}, {"stop": "は"}, {"top_k": 1, "logit_bias": {"44": -100}}])
def test_a_chats_logprobs_are_of_all_its_tokens_and_the_same_in_a_stream(
    ask: Asker, fields: Body
) -> None:
    asked: Body = {"logprobs": True, "top_logprobs": 20, "max_tokens": 16, **fields}
    whole = ask.chat(**asked)
    (choice,) = choices_of(whole)
    usage, logprobs = whole["usage"], choice["logprobs"]
    assert isinstance(usage, dict)
    assert isinstance(logprobs, dict)
    content = logprobs["content"]
    assert logprobs["refusal"] is None
    assert len(content) == usage["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 20
        assert -9999 <= entry["logprob"] <= 0
        assert all(byte in range(256) for byte in entry["bytes"])
    chunks = ask.events("chat/completions", **asked)
    streamed = [
        entry
        for event in chunks
        for entry in (choices_of(event)[0]["logprobs"] or {"content": []})["content"]  # type: ignore[index]  # JSON
    ]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in content]
    assert [e["logprob"] for e in streamed] == pytest.approx([e["logprob"] for e in content])


def test_logprobs_tell_the_bytes_of_half_characters(ask: Asker) -> None:
    ids = ask.tokenizer.encode_plain("\U0001f409")
    assert len(ids) > 1
    forced: Body = {"logit_bias": {str(ids[0]): 100}, "max_tokens": 1, "logprobs": True}
    (choice,) = choices_of(ask.chat(**forced))
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    (entry,) = logprobs["content"]
    data = ask.tokenizer.token_bytes(ids[0])
    assert bytes(entry["bytes"]) == data
    assert entry["token"] == "".join(f"\\x{byte:02x}" for byte in data)
    assert choice["message"] == {"role": "assistant", "content": "\ufffd", "refusal": None}


def test_the_official_sdk_reads_logprobs(ask: Asker) -> None:
    chat = ask.client.chat.completions.create(
        model=ask.model,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    plain = ask.client.completions.create(model=ask.model, prompt=PROMPT, logprobs=2, max_tokens=3)
    assert plain.choices[0].logprobs is not None
    assert len(plain.choices[0].logprobs.tokens or ()) == 3
