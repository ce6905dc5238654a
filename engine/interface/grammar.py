"""A language that an output must belong to: the value that travels with a request.

Whether the source makes sense is not known here; `engine/grammar` finds out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.interface.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICE_STRINGS = 1024


class GrammarKind(StrEnum):
    """How the source of a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language of whole outputs; the text of a finished output is one of its words.

    | kind | source |
    |---|---|
    | json_schema | a JSON schema, as JSON |
    | regex | a regular expression that the whole output matches; no look-around, no \\1 |
    | choice | a JSON list of strings, of which the output is one |
    | lark | a grammar as Lark writes it, or GBNF (known by its `::=`) |
    """

    kind: GrammarKind
    source: str

    @classmethod
    def any_json_object(cls) -> "Grammar":
        """Any JSON object: OpenAI's `json_object`."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool) -> "Grammar":
        """JSON that is valid by the schema; its keys keep the order they have there."""
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))

    @classmethod
    def choice(cls, strings: Sequence[str]) -> "Grammar":
        """One of the strings."""
        return cls(GrammarKind.CHOICE, json.dumps(list(strings), ensure_ascii=False))

    def validate(self, param: str = "response_format") -> None:
        """Raise InvalidRequest, blaming `param`, when the source is empty or too large."""
        try:
            num_bytes = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} holds half of a surrogate pair at character {error.start}.", param=param
            ) from error
        if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{param} is {num_bytes} bytes long; it must have 1 to {MAX_GRAMMAR_BYTES}.",
                param=param,
            )
