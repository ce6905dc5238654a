"""Grammars that cost a machine dearly to look at, each in another way."""

from engine.interface.grammar import Grammar, GrammarKind

# Passes every check of form, and takes minutes and gigabytes at the first or second token.
BOMB = Grammar(
    GrammarKind.LARK,
    "start: T\nT: /y/ | " + " & ".join(f"/y.*x{i}.{{{i}}}.*/" for i in range(24)),
)


def _tree(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _doubled() -> Grammar:
    defs: dict[str, object] = {"d0": {"type": "string"}}
    for i in range(1, 30):
        pair = [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": f"#/$defs/d{i - 1}"}]
        defs[f"d{i}"] = {"type": "array", "prefixItems": pair}
    return Grammar.json_schema({"$defs": defs, "$ref": "#/$defs/d29"})


HOSTILE = {
    "a bomb": BOMB,
    "patterns that must all match": Grammar.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*x{i}.{{{i}}}.*"} for i in range(30)]}
    ),
    "a large multiple": Grammar.json_schema({"type": "integer", "multipleOf": 1_000_003}),
    "deep nesting": Grammar(GrammarKind.JSON_SCHEMA, _tree(120)),
    "deepest nesting": Grammar(GrammarKind.JSON_SCHEMA, _tree(4000)),
    "repeated repetition": Grammar(GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
    "more of it": Grammar(GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "any of many beginnings": Grammar(GrammarKind.REGEX, "(.*a){800}"),
    "brackets": Grammar(GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000),
    "a huge enum": Grammar.json_schema({"enum": [f"{i * 7919}-value" for i in range(6000)]}),
    "an endless minimum": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "references that double": _doubled(),
    "a loop": Grammar.json_schema({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}),
    "left and right recursion": Grammar(
        GrammarKind.LARK, 'start: s\ns: s s s | s s | "a" | "aa" | '
    ),
    "many rules at once": Grammar(
        GrammarKind.LARK,
        "start: "
        + " | ".join(f"s{i}" for i in range(400))
        + "\n"
        + "\n".join(f's{i}: s{(i + 1) % 400} "x" | s{i * 7 % 400} s{i} | "y"' for i in range(400)),
    ),
}
