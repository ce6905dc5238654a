import json
import re
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.grammar_matcher import GrammarMatcher
from engine.grammar.llguidance_source import GrammarRefused
from engine.grammar.vocabulary import Vocabulary
from engine.interface.grammar import MAX_CHOICE_STRINGS, Grammar, GrammarKind
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.schemas import schemas
from tests.engine.grammar.walks import ids_of, random_output, text_of

# An English sentence, and a sum of products.
ARITHMETIC = """
start: product ("+" product)*
product: NUMBER ("*" NUMBER)*
NUMBER: /[0-9]{1,3}/
"""
GBNF = 'root ::= greeting " " name "!"\ngreeting ::= "Hi" | "Grüß Gott"\nname ::= [A-Z] [a-z]{1,4}'


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def lark(source: str) -> Grammar:
    return Grammar(GrammarKind.LARK, source)


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_ends_is_valid_by_its_schema(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    output = random_output(small_vocabulary, Grammar.json_schema(schema), Random(seed))
    if output is not None:
        jsonschema.validate(json.loads(text_of(small_tokenizer, output)), schema)


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_and_with_the_tokens_of_a_real_model(
    demo_vocabulary: Vocabulary, demo_tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    output = random_output(demo_vocabulary, Grammar.json_schema(schema), Random(seed))
    if output is not None:
        jsonschema.validate(json.loads(text_of(demo_tokenizer, output)), schema)


def test_a_json_object_is_one(small_vocabulary: Vocabulary, small_tokenizer: Tokenizer) -> None:
    outputs = [
        random_output(small_vocabulary, Grammar.any_json_object(), Random(seed))
        for seed in range(8)
    ]
    ended = [text_of(small_tokenizer, output) for output in outputs if output is not None]
    assert any(len(text) > 2 for text in ended)
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_is_one_of_its_strings(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer, seed: int
) -> None:
    strings = ["hello", "hell", 'quo"te\\n', "日本", "tab\tand\nline\x01"]
    output = random_output(small_vocabulary, Grammar.choice(strings), Random(seed))
    assert output is not None
    assert text_of(small_tokenizer, output) in strings


@pytest.mark.parametrize("seed", range(2))
def test_every_control_character_may_stand_in_a_choice(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer, seed: int
) -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]))
    output = random_output(small_vocabulary, Grammar.choice([controls]), Random(seed))
    assert output is not None
    assert text_of(small_tokenizer, output) == controls


def test_as_many_choices_as_are_allowed_can_be_followed_to_their_end(
    demo_vocabulary: Vocabulary, demo_tokenizer: Tokenizer
) -> None:
    strings = [f"x{number}" for number in range(MAX_CHOICE_STRINGS)]
    output = random_output(demo_vocabulary, Grammar.choice(strings), Random(0))
    assert output is not None
    assert text_of(demo_tokenizer, output) in strings


@pytest.mark.parametrize("pattern", [r"[a-f]{3}(-\d{2}){1,2}", r"(yes|no|größer)!?", "[^x\n]{3}"])
@pytest.mark.parametrize("seed", range(3))
def test_a_regex_matches_the_whole_output(
    demo_vocabulary: Vocabulary, demo_tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    output = random_output(demo_vocabulary, regex(pattern), Random(seed))
    assert output is not None
    assert re.fullmatch(pattern, text_of(demo_tokenizer, output))


@pytest.mark.parametrize("seed", range(3))
def test_grammars_are_read_as_lark_and_as_gbnf(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer, seed: int
) -> None:
    output = random_output(small_vocabulary, lark(ARITHMETIC), Random(seed))
    assert output is None or re.fullmatch(r"\d+([+*]\d+)*", text_of(small_tokenizer, output))
    output = random_output(small_vocabulary, lark(GBNF), Random(seed))
    assert output is not None
    assert re.fullmatch(r"(Hi|Grüß Gott) [A-Z][a-z]{1,4}!", text_of(small_tokenizer, output))


def test_a_character_of_several_tokens_is_finished(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer
) -> None:
    matcher = GrammarMatcher(small_vocabulary, regex("[éè]x?"))
    first, second = b"\xc3", "é".encode()[1:]
    spelled = {small_tokenizer.token_bytes(i): i for i in range(small_tokenizer.vocab_size)}
    matcher.accept([spelled[first]])
    allowed = matcher.allowed()
    texts = {small_tokenizer.token_bytes(i) for i in ids_of(allowed)}
    assert (texts, allowed.may_end) == ({b"\xa8", second}, False)
    matcher.accept([spelled[second]])
    assert matcher.allowed().may_end


def test_every_token_of_the_same_text_is_allowed_alike(
    small_vocabulary: Vocabulary, small_tokenizer: Tokenizer
) -> None:
    ids = ids_of(GrammarMatcher(small_vocabulary, regex("[ab]c")).allowed())
    same = [i for i in range(small_tokenizer.vocab_size) if small_tokenizer.token_bytes(i) == b"a"]
    assert len(same) == 2
    assert set(same) <= set(ids)


@pytest.mark.parametrize("pattern", [".*", "[^a]+", r"(<\|im_end\|>|</s>)x"])
def test_control_tokens_are_never_text(
    small_vocabulary: Vocabulary,
    demo_vocabulary: Vocabulary,
    small_tokenizer: Tokenizer,
    demo_tokenizer: Tokenizer,
    pattern: str,
) -> None:
    for vocabulary, tokenizer in (
        (small_vocabulary, small_tokenizer),
        (demo_vocabulary, demo_tokenizer),
    ):
        ids = set(ids_of(GrammarMatcher(vocabulary, regex(pattern)).allowed()))
        assert ids.isdisjoint(tokenizer.special_ids | tokenizer.eos_token_ids)


@given(schemas, st.integers(0, 2**32), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_a_matcher_built_from_the_tokens_allows_the_same(
    small_vocabulary: Vocabulary, schema: dict[str, Any], seed: int, random: Random
) -> None:
    grammar = Grammar.json_schema(schema)
    output = random_output(small_vocabulary, grammar, Random(seed)) or []
    middle = random.randint(0, len(output))
    at_once, one_by_one = (GrammarMatcher(small_vocabulary, grammar) for _ in range(2))
    at_once.accept(output[:middle])
    for token_id in output[:middle]:
        one_by_one.allowed()
        one_by_one.accept([token_id])
    here, there = at_once.allowed(), one_by_one.allowed()
    assert here.may_end == there.may_end
    np.testing.assert_array_equal(here.words, there.words)


def test_a_token_that_the_grammar_forbids_is_refused(small_vocabulary: Vocabulary) -> None:
    for token_id in (0, 2, 200):
        matcher = GrammarMatcher(small_vocabulary, regex("[ab]+"))
        with pytest.raises(GrammarRefused):
            matcher.accept([token_id])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"$ref": "#/$defs/gone"}, "gone"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "127.0.0.1"),
        ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, "complete the output"),
        ({"properties": {"a": {"x-guidance": {}}}}, "#/properties/a"),
        ({"items": {"type": "object", "minProperties": 3}}, "#/items"),
        ({"oneOf": [{"type": "number"}, {"const": 1}]}, "oneOf"),
        ({"type": "string", "format": "wurst"}, "wurst"),
        ({"minimum": 3, "maximum": 1, "type": "integer"}, "minimum"),
    ],
)
def test_a_schema_that_would_not_be_kept_to_is_refused(
    small_vocabulary: Vocabulary, schema: dict[str, Any], why: str
) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        GrammarMatcher(small_vocabulary, Grammar.json_schema(schema)).allowed()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(a"), "unclosed"),
        (regex("(?=a)b"), "look-around"),
        (lark("start: foo"), "foo"),
        (lark('root ::= "a" foo'), "foo"),
        (lark("start: </s>"), "complete the output"),
        (lark('start: %json {"x-guidance": {"lenient": true}}'), "%json is not served"),
        (lark('%llguidance {"no_forcing": true}\nstart: "a"'), "%llguidance is not served"),
        (Grammar.choice([]), "not of 0"),
        (Grammar(GrammarKind.CHOICE, '["a", 1]'), "list of strings"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 50_000), "deeply"),
    ],
)
def test_a_broken_grammar_is_refused_with_the_place(
    small_vocabulary: Vocabulary, grammar: Grammar, why: str
) -> None:
    with pytest.raises(GrammarRefused, match=why):
        GrammarMatcher(small_vocabulary, grammar).allowed()


def test_white_space_in_json_is_bounded(
    demo_vocabulary: Vocabulary, demo_tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    pretty = '{\n  "a": 1\n}'
    matcher = GrammarMatcher(demo_vocabulary, Grammar.json_schema(schema))
    matcher.accept(demo_tokenizer.encode_plain(pretty))
    assert matcher.allowed().may_end
    with pytest.raises(GrammarRefused):
        GrammarMatcher(demo_vocabulary, Grammar.json_schema(schema)).accept(
            demo_tokenizer.encode_plain("{" + 200 * "\n")
        )
