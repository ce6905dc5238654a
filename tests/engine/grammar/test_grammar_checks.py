"""One process for each model whose grammars are asked about, and not for too many models."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.grammar.grammar_checks import GrammarChecks
from engine.grammar.grammar_compiler import GrammarBusy
from engine.interface.errors import InvalidRequest
from engine.interface.grammar import Grammar, GrammarKind

FINE = Grammar.json_schema({"type": "object"})


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks(max_models=2)
    yield checks
    checks.close()


@pytest.fixture
def folders(small_folder: Path, tmp_path: Path) -> list[Path]:
    for name in "abc":
        (tmp_path / name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(small_folder / file, tmp_path / name)
    return [tmp_path / name for name in "abc"]


async def test_the_models_asked_about_last_keep_their_process(
    checks: GrammarChecks, folders: list[Path]
) -> None:
    a, b, c = folders
    for folder in (a, b, a):
        await checks.check(folder, FINE, "p")
    assert list(checks._compilers) == [b, a]
    await checks.check(c, FINE, "p")
    assert list(checks._compilers) == [a, c]
    with pytest.raises(InvalidRequest) as refusal:
        await checks.check(b, Grammar(GrammarKind.REGEX, "("), "guided_regex")
    assert refusal.value.param == "guided_regex"


async def test_no_compiler_is_taken_from_who_waits_for_it(
    checks: GrammarChecks, folders: list[Path]
) -> None:
    asking = [asyncio.create_task(checks.check(folder, FINE, "p")) for folder in folders[:2]]
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusy, match="too many models"):
        await checks.check(folders[2], FINE, "p")
    await asyncio.gather(*asking)
    await checks.check(folders[2], FINE, "p")
