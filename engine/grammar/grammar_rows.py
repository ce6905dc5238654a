"""The grammars of a step's rows: what may come next in each, worked out while the model computes.

    begin(rows) ──▶ the matchers' process goes on by the new tokens ──▶ finish(): masks or errors

A row's matcher is kept over there for as long as its sequence keeps its slot. One that is not
there (any more) is built again from grammar and output, so nothing is lost by a preemption, by
a move to another replica, or with the process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.grammar.allowed import Allowed
from engine.grammar.matcher_messages import Crashed, Mask, Masks, Refused, Row
from engine.grammar.matcher_process import MatcherProcess
from engine.interface.grammar import Grammar

# Twice what the compiler allows: what passed there must not fail here for a bad moment.
_CPU_LIMIT_S = 0.5
_MEMORY_BYTES = 4 * 1024 * 1024 * 1024
# A row is at fault if the worker dies of it even when it is the first of a fresh one.
_MAX_DEATHS = 2


class GrammarRow(NamedTuple):
    """One sequence that wants a token: its slot, who it is, its grammar and its output so far."""

    slot: int
    owner: object
    grammar: Grammar
    output_ids: NDArray[np.int64]


class _Sent(NamedTuple):
    owner: object
    num_tokens: int


class GrammarRows:
    """Not for two threads at once; whatever is begun is finished. Call `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self._process = MatcherProcess(folder, _CPU_LIMIT_S, _MEMORY_BYTES)
        self._sent: dict[int, _Sent] = {}
        self._rows: Sequence[GrammarRow] = ()

    def start(self) -> None:
        """Start the process and wait until it is ready, so that no step pays for it."""
        self._process.start()

    def begin(self, rows: Sequence[GrammarRow]) -> None:
        """Ask about these rows; returns at once."""
        self._rows = rows
        if rows:
            self._send(rows)

    def finish(self) -> list[Allowed | str]:
        """For each row what may come next, or why its output cannot go on."""
        rows, self._rows = self._rows, ()
        results: list[Allowed | str] = []
        num_deaths = 0
        while len(results) < len(rows):
            answer = self._process.receive()
            if isinstance(answer, Mask):
                results.append(Allowed(np.frombuffer(answer.words, np.uint32), answer.may_end))
            elif isinstance(answer, Refused):
                del self._sent[rows[len(results)].slot]
                results.append(f"The output's grammar: {answer.reason}")
            else:
                num_deaths += 1
                self._sent.clear()
                if num_deaths >= _MAX_DEATHS:
                    reason = answer.reason if isinstance(answer, Crashed) else "no process for it."
                    results.append(f"The output's grammar: {reason}")
                    num_deaths = 0
                if len(results) < len(rows):
                    self._send(rows[len(results) :])
                continue
            num_deaths = 0
        return results

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _send(self, rows: Sequence[GrammarRow]) -> None:
        self._process.send(Masks([self._message(row) for row in rows]))

    def _message(self, row: GrammarRow) -> Row:
        """Only what the matcher in this slot does not know yet."""
        sent = self._sent.get(row.slot)
        num_tokens = len(row.output_ids)
        is_known = sent is not None and sent.owner is row.owner and sent.num_tokens <= num_tokens
        new_ids = row.output_ids[sent.num_tokens :] if sent and is_known else row.output_ids
        self._sent[row.slot] = _Sent(row.owner, num_tokens)
        grammar = None if is_known else row.grammar
        return Row(row.slot, grammar, new_ids.astype(np.int32).tobytes())
