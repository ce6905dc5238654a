import asyncio
import threading
import time
from pathlib import Path

import pytest

from engine.grammar.grammar_compiler import GrammarBusy, GrammarCompiler
from engine.interface.errors import InvalidRequest
from engine.interface.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from tests.engine.grammar.hostile import BOMB, HOSTILE

FINE = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


def refused(compiler: GrammarCompiler, grammar: Grammar) -> InvalidRequest | None:
    try:
        compiler.check_blocking(grammar)
    except InvalidRequest as refusal:
        return refusal
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_costs_little_and_the_next_is_served(
    compiler: GrammarCompiler, name: str
) -> None:
    compiler.start()
    before = time.process_time()
    refusal = refused(compiler, HOSTILE[name])
    assert refusal is None or refusal.param == "response_format"
    assert refusal is None or str(refusal).startswith("response_format cannot be served: ")
    compiler.check_blocking(FINE)
    assert time.process_time() - before < 0.25, "the parent worked for it"


def test_what_passes_and_what_does_not_is_remembered(compiler: GrammarCompiler) -> None:
    verdicts = []
    for _ in range(3):
        with pytest.raises(InvalidRequest) as refusal:
            compiler.check_blocking(BOMB, "structured_outputs.grammar")
        verdicts.append(str(refusal.value))
        assert refusal.value.param == "structured_outputs.grammar"
    assert len(set(verdicts)) == 1
    assert "too much" in verdicts[0]


def test_a_grammar_of_the_wrong_size_is_refused_unseen(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "nothing")
    for grammar in (
        Grammar(GrammarKind.REGEX, ""),
        Grammar(GrammarKind.REGEX, "é" * MAX_GRAMMAR_BYTES),
        Grammar(GrammarKind.REGEX, "\ud800"),
    ):
        with pytest.raises(InvalidRequest):
            compiler.check_blocking(grammar)
    compiler.close()


def test_without_a_process_there_is_no_verdict(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "nothing")
    with pytest.raises(GrammarBusy, match="does not start"):
        compiler.check_blocking(FINE)
    compiler.close()
    with pytest.raises(GrammarBusy, match="closed"):
        compiler.check_blocking(FINE)


async def test_an_event_loop_goes_on_while_a_grammar_is_compiled(small_folder: Path) -> None:
    compiler = GrammarCompiler(small_folder, max_waiting=1)
    check = asyncio.create_task(compiler.check(BOMB))
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusy, match="Too many"):
        await compiler.check(FINE)
    assert not check.done()
    with pytest.raises(InvalidRequest):
        await check
    await compiler.check(FINE)
    await compiler.check(FINE)
    await asyncio.to_thread(compiler.close)


def test_any_thread_may_ask(compiler: GrammarCompiler) -> None:
    grammars = [Grammar.choice([f"answer {i % 8}"]) for i in range(24)]
    passed = []

    def ask(grammar: Grammar) -> None:
        compiler.check_blocking(grammar)
        passed.append(grammar)

    threads = [threading.Thread(target=ask, args=(grammar,)) for grammar in grammars]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == len(grammars)
