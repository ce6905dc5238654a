"""What llguidance is asked, for each kind of grammar.

It refuses by itself what it does not implement. Here is refused what it would let pass and get
wrong, and here its options are fixed, so that a schema cannot set them.
"""

import json
import re
from collections.abc import Iterator

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.interface.grammar import MAX_CHOICE_STRINGS, Grammar, GrammarKind

# A space, or a new line and what indents it: a model that is fond of space cannot go on for ever.
_WHITE_SPACE = r"[ \t]|\r?\n[ \t]{0,64}"

# What would bring options of its own, or a schema that is not looked at here.
_FOREIGN = re.compile(r"%\s*(?:json|llguidance)\b")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')

_ONE = ("items", "additionalProperties", "additionalItems")
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAP = ("properties", "patternProperties", "$defs", "definitions")


class GrammarRefused(Exception):
    """The grammar is broken, not served or too much; the message says what and where."""


def llguidance_source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises GrammarRefused."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = _parsed(grammar.source)
            schema = {} if schema is True else schema
            if not isinstance(schema, dict):
                raise GrammarRefused("a JSON schema is an object.")
            for path, node in _subschemas(schema, "#"):
                _check_subschema(path, node)
            return LLMatcher.grammar_from_json_schema(
                json.dumps(schema),
                overrides={
                    "item_separator": ",",
                    "key_separator": ":",
                    "whitespace_flexible": True,
                    "whitespace_pattern": _WHITE_SPACE,
                    "coerce_one_of": False,
                    "lenient": False,
                },
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex(_choice_regex(_parsed(grammar.source)))
        case GrammarKind.LARK:
            try:
                lark = any_to_lark(grammar.source)
            except Exception as error:
                raise GrammarRefused(f"the grammar cannot be read: {error}") from error
            if found := _FOREIGN.search(_STRING.sub('""', grammar.source)):
                raise GrammarRefused(f"{found[0]} is not served inside a grammar.")
            return LLMatcher.grammar_from_lark(lark)


def _parsed(source: str) -> object:
    try:
        return json.loads(source)
    except ValueError as error:
        raise GrammarRefused(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarRefused("it is nested too deeply.") from error


def _choice_regex(strings: object) -> str:
    # As a regex: a rule's alternatives are bounded by the parser's rows, and its strings may not
    # hold every control character.
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise GrammarRefused("a choice is a list of strings.")
    if not 0 < len(strings) <= MAX_CHOICE_STRINGS:
        raise GrammarRefused(
            f"a choice is of 1 to {MAX_CHOICE_STRINGS} strings, not of {len(strings)}."
        )
    return "(?:" + "|".join("".join(map(_literal, text)) for text in strings) + ")"


def _literal(character: str) -> str:
    is_plain = character.isascii() and (character.isalnum() or character == " ")
    return character if is_plain else f"\\x{{{ord(character):x}}}"


def _subschemas(schema: object, path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Every schema in the schema, with where it stands."""
    waiting = [(path, schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        waiting += [(f"{path}/{key}", node[key]) for key in _ONE if key in node]
        for key in _LIST:
            entries = node.get(key)
            if isinstance(entries, list):
                waiting += [(f"{path}/{key}/{i}", entry) for i, entry in enumerate(entries)]
        for key in _MAP:
            entries = node.get(key)
            if isinstance(entries, dict):
                waiting += [(f"{path}/{key}/{name}", entry) for name, entry in entries.items()]


def _check_subschema(path: str, node: dict[str, object]) -> None:
    if "x-guidance" in node:
        raise GrammarRefused(f"{path}: x-guidance is not served.")
    required = node.get("required")
    least = node.get("minProperties", 0)
    num_required = len(required) if isinstance(required, list) else 0
    # Extra keys may be written twice, and then count once.
    if isinstance(least, int | float) and least > num_required + 1:
        raise GrammarRefused(
            f"{path}: minProperties is {least}, but only {num_required} are required; name the "
            "properties that must be there under required."
        )
