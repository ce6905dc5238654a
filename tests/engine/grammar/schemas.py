"""JSON schemas for property tests; outputs by them come to an end soon."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = st.sampled_from(["a", "id", "größe", "two words", 'quo"te', "", "日本"])
VALUES = st.sampled_from([None, True, False, 0, -3, 12.5, "", "red", 'é"\\', "日本\n"])
BOUND = st.integers(-300, 300)


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 3))
    schema: Schema = {"type": "string", "minLength": least, "maxLength": least + draw(BOUND) % 5}
    if draw(st.booleans()):
        patterns = ["^[a-z]{2,5}$", "^(red|grün|日本)$", "^\\d{2}-[A-F]+$", "x", "^a?b*c"]
        schema = {"type": "string", "pattern": draw(st.sampled_from(patterns)), "maxLength": 9}
    return schema


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    least, width = draw(BOUND), draw(st.integers(2, 50))
    kind = draw(st.sampled_from(["integer", "number"]))
    low = draw(st.sampled_from(["minimum", "exclusiveMinimum"]))
    high = draw(st.sampled_from(["maximum", "exclusiveMaximum"]))
    schema: Schema = {"type": kind, low: least, high: least + width}
    if kind == "integer" and draw(st.booleans()):
        # Within any 101 numbers in a row there is a multiple of these.
        schema = {"type": kind, low: least, high: least + 101, "multipleOf": draw(BOUND) % 9 + 1}
    return schema


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    first = draw(st.lists(items, max_size=2))
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + len(first)}
    return schema | ({"prefixItems": first} if first else {}) | {"items": draw(items)}


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_LEAVES = st.one_of(
    _strings(),
    _numbers(),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": ["null", "boolean"]}, {"type": "null"}]),
)

schemas = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)
