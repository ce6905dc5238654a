from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from engine.grammar.allowed import Allowed
from engine.grammar.grammar_matcher import GrammarMatcher
from engine.grammar.grammar_rows import GrammarRow, GrammarRows
from engine.grammar.vocabulary import Vocabulary
from engine.interface.grammar import Grammar, GrammarKind
from tests.engine.grammar.hostile import BOMB
from tests.engine.grammar.walks import ids_of, random_output

OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
LETTERS = Grammar(GrammarKind.REGEX, "[ab]{4,9}")


@pytest.fixture(scope="module")
def rows(small_folder: Path) -> Iterator[GrammarRows]:
    rows = GrammarRows(small_folder)
    yield rows
    rows.close()


def row(slot: int, owner: object, grammar: Grammar, output_ids: list[int]) -> GrammarRow:
    return GrammarRow(slot, owner, grammar, np.array(output_ids, np.int64))


def asked(rows: GrammarRows, *step: GrammarRow) -> list[Allowed | str]:
    rows.begin(step)
    return rows.finish()


def expect(vocabulary: Vocabulary, answer: Allowed | str, row: GrammarRow) -> None:
    """The answer is that of a matcher that has seen this output only."""
    matcher = GrammarMatcher(vocabulary, row.grammar)
    matcher.accept(row.output_ids.tolist())
    expected = matcher.allowed()
    assert isinstance(answer, Allowed), answer
    assert (ids_of(answer), answer.may_end) == (ids_of(expected), expected.may_end)


def test_slots_may_change_hands_in_any_order(
    rows: GrammarRows, small_vocabulary: Vocabulary
) -> None:
    random = Random(1)
    outputs = [random_output(small_vocabulary, g, random) or [] for g in (OBJECT, LETTERS) * 3]
    lengths = [0] * len(outputs)
    for _ in range(60):
        step = []
        for slot, who in enumerate(random.sample(range(len(outputs)), 3)):
            lengths[who] = random.randint(lengths[who] // 2, len(outputs[who]))
            grammar = (OBJECT, LETTERS)[who % 2]
            step.append(row(slot, outputs[who], grammar, outputs[who][: lengths[who]]))
        for asked_row, answer in zip(step, asked(rows, *step), strict=True):
            expect(small_vocabulary, answer, asked_row)


def test_a_row_that_goes_astray_ends_alone(rows: GrammarRows, small_vocabulary: Vocabulary) -> None:
    step = [row(0, "a", LETTERS, []), row(1, "b", LETTERS, [2]), row(2, "c", OBJECT, [])]
    for _ in range(2):
        first, second, third = asked(rows, *step)
        assert isinstance(second, str)
        assert "grammar" in second
        expect(small_vocabulary, first, step[0])
        expect(small_vocabulary, third, step[2])


def test_a_row_that_kills_the_worker_ends_alone(
    rows: GrammarRows, small_vocabulary: Vocabulary
) -> None:
    y = ids_of(GrammarMatcher(small_vocabulary, BOMB).allowed())[:1]
    output = random_output(small_vocabulary, OBJECT, Random(5)) or []
    assert len(output) > 4
    before = row(0, "killed a", OBJECT, output[:3])
    expect(small_vocabulary, asked(rows, before)[0], before)
    step = [
        row(0, "killed a", OBJECT, output[:4]),
        row(1, "killed b", BOMB, y),
        row(2, "killed c", LETTERS, []),
    ]
    first, second, third = asked(rows, *step)
    assert isinstance(second, str)
    assert "too much" in second
    expect(small_vocabulary, first, step[0])
    expect(small_vocabulary, third, step[2])
    after = row(0, "killed a", OBJECT, output[:5])
    expect(small_vocabulary, asked(rows, after)[0], after)


def test_outputs_outlive_the_process(rows: GrammarRows, small_vocabulary: Vocabulary) -> None:
    step = [row(0, "outliving a", LETTERS, []), row(1, "outliving b", OBJECT, [])]
    asked(rows, *step)
    rows.close()
    for asked_row, answer in zip(step, asked(rows, *step), strict=True):
        expect(small_vocabulary, answer, asked_row)
    rows.begin(step)
    rows.close()
    for asked_row, answer in zip(step, rows.finish(), strict=True):
        expect(small_vocabulary, answer, asked_row)
