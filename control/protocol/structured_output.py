"""What a caller may ask of an output's form, and the grammar that this means.

The form is asked for in one of three ways: OpenAI's `response_format`, vLLM's
`structured_outputs`, or the `guided_…` fields that vLLM had before. At most one of them may
constrain the output. Pure: whether a grammar can be served is found out by who has the model's
vocabulary (`engine.grammar`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from control.protocol.strict_model import StrictModel, Unserved, invalid, only, unsupported
from engine.interface.errors import InvalidRequest
from engine.interface.grammar import Grammar, GrammarKind

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for the output, and the field to blame should it be of no use."""

    grammar: Grammar
    param: str


def _check_kind(kind: object) -> object:
    if kind == "structural_tag":
        raise unsupported("Served are text, json_object and json_schema.")
    return kind


def _check_schema(schema: object) -> object:
    if not isinstance(schema, str | dict):
        raise invalid("Must be a JSON schema: an object, or a string that holds one.")
    return schema


FormatKind = Annotated[Literal["text", "json_object", "json_schema"], BeforeValidator(_check_kind)]
Schema = Annotated[Any, BeforeValidator(_check_schema)]
Choice = Annotated[list[str], Field(min_length=1, fail_fast=True)]
SchemaName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class NamedSchema(StrictModel):
    """OpenAI's wrapping of a schema.

    Name and description are for the caller: no model here is shown them. The output is held to
    the schema whatever `strict` says.
    """

    name: SchemaName
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: FormatKind
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema_fits_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("Is required when type is json_schema.", "response_format.json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise invalid("Only allowed when type is json_schema.", "response_format.json_schema")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None

    disable_fallback: bool | None = None  # there is nothing to fall back to
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Unserved = None
    structural_tag: Unserved = None


class StructuredOutputFields(StrictModel):
    """The fields of a request that say what its output may be."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Unserved = None
    guided_whitespace_pattern: Unserved = None

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the output must be; None for any text.

        Raises InvalidRequest when several fields say something, or when what one says is empty,
        too large or no text.
        """
        found = list(self._constraints())
        if len(found) > 1:
            first, second = found[0][0], found[1][0]
            raise InvalidRequest(
                f"{first} and {second} both say what the output must be; send one of them.",
                param=second,
            )
        for param, kind, source in found:
            constraint = Constraint(Grammar(kind, _as_source(source, param)), param)
            constraint.grammar.validate(param)
            return constraint
        if self.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs says nothing; give it one of json, json_object, regex, choice "
                "and grammar, or leave it out.",
                param="structured_outputs",
            )
        return None

    def _constraints(self) -> Iterator[tuple[str, GrammarKind, object]]:
        """Every constraint that is asked for: its field, and how to read what it holds."""
        asked = self.response_format
        if asked is not None and asked.type == "json_object":
            yield "response_format", GrammarKind.JSON_SCHEMA, _ANY_OBJECT
        if asked is not None and asked.json_schema is not None:
            param = "response_format.json_schema.schema"
            yield param, GrammarKind.JSON_SCHEMA, asked.json_schema.schema_
        inner = self.structured_outputs or StructuredOutputs()
        if inner.json_object:
            yield "structured_outputs.json_object", GrammarKind.JSON_SCHEMA, _ANY_OBJECT
        for param, kind, source in (
            ("structured_outputs.json", GrammarKind.JSON_SCHEMA, inner.json_),
            ("structured_outputs.regex", GrammarKind.REGEX, inner.regex),
            ("structured_outputs.choice", GrammarKind.CHOICE, inner.choice),
            ("structured_outputs.grammar", GrammarKind.LARK, inner.grammar),
            ("guided_json", GrammarKind.JSON_SCHEMA, self.guided_json),
            ("guided_regex", GrammarKind.REGEX, self.guided_regex),
            ("guided_choice", GrammarKind.CHOICE, self.guided_choice),
            ("guided_grammar", GrammarKind.LARK, self.guided_grammar),
        ):
            if source is not None:
                yield param, kind, source


_ANY_OBJECT = {"type": "object"}


def _as_source(source: object, param: str) -> str:
    """Text as it is; a schema or a list of choices as JSON."""
    if isinstance(source, str):
        return source
    try:
        return json.dumps(source, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from error
