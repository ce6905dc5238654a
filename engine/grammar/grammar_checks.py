"""Checks grammars for every model that a process meets, where no engine runs.

The front door and the batch workers ask here, so that a grammar that cannot be served is the
caller's error before anything is accepted. A model's compiler, a process that holds its
vocabulary, starts with the model's first grammar; the most recently used few are kept.
"""

import asyncio
from collections import Counter, OrderedDict
from pathlib import Path

from engine.grammar.grammar_compiler import GrammarBusy, GrammarCompiler
from engine.interface.grammar import Grammar

MAX_MODELS = 4
# Half of what a replica allows: what passes here must not fail there for a bad moment.
_CPU_LIMIT_S = 0.125


class GrammarChecks:
    """For one event loop at a time. Call `close` at the end."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._compilers: OrderedDict[Path, GrammarCompiler] = OrderedDict()
        self._num_asking: Counter[Path] = Counter()

    async def check(self, folder: Path, grammar: Grammar, param: str) -> None:
        """Raise InvalidRequest, blaming `param`, if the model of the folder cannot follow it.

        Raises GrammarBusy when there is no saying.
        """
        self._num_asking[folder] += 1
        try:
            compiler = self._compilers.get(folder) or await self._add(folder)
            self._compilers.move_to_end(folder)
            await compiler.check(grammar, param)
        finally:
            self._num_asking[folder] -= 1

    def close(self) -> None:
        """End every process."""
        while self._compilers:
            self._compilers.popitem()[1].close()

    async def _add(self, folder: Path) -> GrammarCompiler:
        """A compiler for a model that has none, in the place of one that nobody asks."""
        idle = [known for known in self._compilers if not self._num_asking[known]]
        is_full = len(self._compilers) >= self._max_models
        if is_full and not idle:
            raise GrammarBusy("Grammars of too many models are being compiled.")
        added = self._compilers[folder] = GrammarCompiler(folder, cpu_limit_s=_CPU_LIMIT_S)
        if is_full:
            # It may still be at a grammar whose asker has left.
            await asyncio.to_thread(self._compilers.pop(idle[0]).close)
        return added
