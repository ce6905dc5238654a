"""The form of an output, as OpenAI and vLLM let callers ask for it."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from engine.grammar.grammar_compiler import GrammarBusy
from engine.interface.generation_delta import FinishReason
from engine.interface.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import ScriptedReplica
from tests.engine.grammar.hostile import BOMB, HOSTILE

Body = dict[str, Any]

SCHEMA: Body = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["size"],
}
ANY_OBJECT = Grammar.any_json_object()
BY_SCHEMA = Grammar.json_schema(SCHEMA)
REGEX = Grammar(GrammarKind.REGEX, "[ab]+")
CHOICE = Grammar.choice(["yes", "nö"])
LARK = Grammar(GrammarKind.LARK, 'start: "a" | "b"')


class Thing(pydantic.BaseModel):
    """What the SDK is to make of an output."""

    size: int
    name: str | None = None


def named(schema: Body, **more: object) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


def post(http: httpx.Client, model: str, fields: Body, *, chat: bool = True) -> httpx.Response:
    if chat:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return http.post("/v1/chat/completions", json=body)
    return http.post("/v1/completions", json={"model": model, "prompt": "hi", **fields})


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": named(SCHEMA)}, BY_SCHEMA),
        ({"response_format": named(SCHEMA, strict=True, description="a thing")}, BY_SCHEMA),
        ({"response_format": named(SCHEMA, strict=False)}, BY_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json": BY_SCHEMA.source}}, BY_SCHEMA),
        ({"structured_outputs": {"json_object": True, "regex": None}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "[ab]+", "json_object": False}}, REGEX),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, CHOICE),
        ({"structured_outputs": {"grammar": LARK.source}}, LARK),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_regex": "[ab]+", "response_format": {"type": "text"}}, REGEX),
        ({"guided_choice": ["yes", "nö"]}, CHOICE),
        ({"guided_grammar": LARK.source}, LARK),
    ],
)
def test_a_form_is_the_grammar_that_it_means(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    fields: Body,
    grammar: Grammar | None,
    chat: bool,
) -> None:
    answer = post(http, served.model, fields, chat=chat)
    assert answer.status_code == 200, answer.text
    assert replica.latest().request.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": "json"}, "response_format", ""),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "Served are"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {**named({}), "type": "json_object"}},
            "response_format.json_schema",
            "Only allowed",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"response_format": named({}, name="a b")}, "response_format.json_schema.name", ""),
        ({"response_format": named({}, extra=1)}, "response_format.json_schema.extra", "known"),
        (
            {"response_format": named({"type": "objekt"})},
            "response_format.json_schema.schema",
            "objekt",
        ),
        (
            {"response_format": named({"$ref": "#/nowhere"})},
            "response_format.json_schema.schema",
            "nowhere",
        ),
        (
            {"response_format": named({"not": {"type": "string"}})},
            "response_format.json_schema.schema",
            "not",
        ),
        (
            {"response_format": named({"const": "x" * MAX_GRAMMAR_BYTES})},
            "response_format.json_schema.schema",
            str(MAX_GRAMMAR_BYTES),
        ),
        ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "0 bytes"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "Must be"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs.choice", "1024"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "Not served",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "send one of them",
        ),
        (
            {"guided_regex": "a", "guided_decoding_backend": "x"},
            "guided_decoding_backend",
            "Not served",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field_and_a_reason(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    fields: Body,
    param: str,
    told: str,
) -> None:
    rows = served.count_rows(served.model)
    answer = post(http, served.model, fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]
    assert error["code"] in ("invalid_value", "unsupported_parameter", "missing_required_parameter")
    assert served.count_rows(served.model) == rows
    assert not replica.runs


def _as_fields(grammar: Grammar) -> Body:
    names = {
        GrammarKind.JSON_SCHEMA: "json",
        GrammarKind.REGEX: "regex",
        GrammarKind.LARK: "grammar",
    }
    if grammar.kind is GrammarKind.CHOICE:
        return {"structured_outputs": {"choice": json.loads(grammar.source)}}
    return {"structured_outputs": {names[grammar.kind]: grammar.source}}


def test_hostile_grammars_neither_stop_nor_delay_others(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    for grammar in HOSTILE.values():
        answer = post(http, served.model, {**_as_fields(grammar), "max_tokens": 2})
        assert answer.status_code in (200, 400), answer.text
    too_much = post(http, served.model, _as_fields(BOMB)).json()["error"]
    assert "too much" in too_much["message"]
    assert post(http, served.model, {"response_format": named(SCHEMA)}).status_code == 200


def test_a_check_that_finds_no_room_is_our_limit_and_comes_back(
    http: httpx.Client,
    live: LiveGateway,
    served: Served,
    replica: ScriptedReplica,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def busy(*_: object) -> None:
        raise GrammarBusy("Too many grammars wait to be compiled.")

    monkeypatch.setattr(live.gateway.grammars._checks, "check", busy)
    answer = post(http, served.model, {"response_format": {"type": "json_object"}})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert int(answer.headers["retry-after-ms"]) > 0
    assert not replica.runs


def test_the_sdk_parses_what_was_said(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = lambda run: iter(
        [run.say('{"size":'), run.say('7,"name":null}', finish=FinishReason.STOP), run.end()]
    )
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = sdk.chat.completions.parse(model=served.model, messages=messages, response_format=Thing)
    assert whole.choices[0].message.parsed == Thing(size=7)
    grammar = replica.latest().request.sampling.grammar
    assert grammar is not None
    assert set(json.loads(grammar.source)["properties"]) == {"size", "name"}
    with sdk.chat.completions.stream(
        model=served.model, messages=messages, response_format=Thing
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == Thing(size=7)


def test_an_output_that_was_cut_says_so_to_the_sdk(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = lambda run: iter([run.say('{"si', finish=FinishReason.LENGTH), run.end()])
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model=served.model,
            messages=[{"role": "user", "content": "hi"}],
            response_format=Thing,
        )
