"""Every spelling of a form means the same grammar, and two of them mean nothing."""

import itertools
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_schemas import random_schema
from control.protocol.structured_output import StructuredOutputFields
from engine.interface.errors import InvalidRequest
from engine.interface.grammar import Grammar

FORMS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs.json_object": {"json_object": True},
    "structured_outputs.json": {"json": {}},
    "structured_outputs.regex": {"regex": "a"},
    "structured_outputs.choice": {"choice": ["a"]},
    "structured_outputs.grammar": {"grammar": 'start: "a"'},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}


def grammar_of(**fields: object) -> Grammar:
    constraint = StructuredOutputFields.parse(fields).constraint
    assert constraint is not None
    return constraint.grammar


@given(st.integers(0, 10**6))
def test_a_schema_is_the_same_however_it_is_sent(seed: int) -> None:
    schema = random_schema(Random(seed))
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    grammars = {
        grammar_of(response_format=named),
        grammar_of(structured_outputs={"json": schema}),
        grammar_of(structured_outputs={"json": json.dumps(schema, ensure_ascii=False)}),
        grammar_of(guided_json=schema),
    }
    (grammar,) = grammars
    # As text, so that the order of keys counts.
    assert json.dumps(json.loads(grammar.source)) == json.dumps(schema)


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(FORMS, 2)])
def test_two_forms_are_one_too_many(first: str, second: str) -> None:
    fields: dict[str, Any] = {}
    for name in (first, second):
        field, _, inner = name.partition(".")
        fields[field] = {**fields.get(field, {}), **FORMS[name]} if inner else FORMS[name]
    with pytest.raises(InvalidRequest, match="send one of them") as refusal:
        _ = StructuredOutputFields.parse(fields).constraint
    assert refusal.value.param == second


def test_a_schema_too_deep_to_be_written_down_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="too deep") as refusal:
        grammar_of(guided_json=schema)
    assert refusal.value.param == "guided_json"
    while schema:  # Python frees nested dictionaries one in the other.
        schema = schema["items"]


def test_no_form_is_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert StructuredOutputFields.parse(fields).constraint is None
