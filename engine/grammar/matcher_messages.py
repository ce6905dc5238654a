"""What the engine's process and the matchers' process say to each other."""

import msgspec

from engine.interface.grammar import Grammar


class Check(msgspec.Struct, tag="check", array_like=True):
    """Compile the grammar and walk a few tokens into it. Answered once: Passed or Refused."""

    grammar: Grammar


class Row(msgspec.Struct, array_like=True):
    """One output: what is new of it since the last time, or all of it with its grammar.

    `token_ids` are int32 as they lie in memory. `place` is where its matcher is kept.
    """

    place: int
    grammar: Grammar | None
    token_ids: bytes


class Masks(msgspec.Struct, tag="masks", array_like=True):
    """What may come next in each row. Answered once per row, in order: Mask or Refused."""

    rows: list[Row]


class Passed(msgspec.Struct, tag="passed", array_like=True):
    """The grammar is fit for use."""


class Mask(msgspec.Struct, tag="mask", array_like=True):
    """`Allowed`, its words as they lie in memory."""

    words: bytes
    may_end: bool


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """Why the grammar or its output cannot go on; the matcher is gone."""

    reason: str


class Crashed(msgspec.Struct, tag="crashed", array_like=True):
    """The worker died of what it was to answer next; all matchers and open rows are gone."""

    reason: str


Question = Check | Masks
Answer = Passed | Mask | Refused | Crashed
