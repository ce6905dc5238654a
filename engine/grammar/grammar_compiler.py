"""Says whether a grammar can be served, before anything is reserved or queued for it.

The front door asks so that a bad grammar is the caller's error at once; a replica asks again,
as it does of everything. Compiling happens in a child process, one grammar at a time, under a
limit of processor time and memory; verdicts are remembered.
"""

import asyncio
import contextlib
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine.grammar.grammar_rows import GrammarRows
from engine.grammar.matcher_messages import Check, Crashed, Refused
from engine.grammar.matcher_process import MatcherProcess
from engine.interface.errors import InvalidRequest
from engine.interface.grammar import Grammar
from engine.text.child_process import ChildLost

_MAX_VERDICTS = 2048


class GrammarBusy(RuntimeError):
    """No verdict, through no fault of the grammar: too many wait, or no process starts."""


class GrammarCompiler:
    """Checks grammars for the model in a folder; any thread and any event loop may ask.

    At most `max_waiting` checks wait. The process starts with the first one, or with `start`.
    Call `close` at the end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cpu_limit_s: float = 0.25,
        memory_bytes: int = 1024 * 1024 * 1024,
        max_waiting: int = 256,
    ) -> None:
        self._folder = folder
        self._unstarted: list[GrammarRows] = []
        self._rows: list[GrammarRows] = []
        self._process = MatcherProcess(folder, cpu_limit_s, memory_bytes)
        self._places = threading.Semaphore(max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start what checks need and wait until it is ready, so that no request pays for it."""
        self._thread.submit(self._start).result()

    def new_rows(self) -> GrammarRows:
        """What a model runner follows outputs with; ready by the time that a check passes."""
        rows = GrammarRows(self._folder)
        self._unstarted.append(rows)
        self._rows.append(rows)
        return rows

    async def check(self, grammar: Grammar, param: str = "response_format") -> None:
        """Raise InvalidRequest, blaming `param`, if the grammar cannot be served.

        Raises GrammarBusy when there is no saying.
        """
        grammar.validate(param)
        verdict = self._known(grammar)
        if isinstance(verdict, Future):
            verdict = await asyncio.wrap_future(verdict)
        _raise(verdict, param)

    def check_blocking(self, grammar: Grammar, param: str = "response_format") -> None:
        """As `check`, for callers without an event loop."""
        grammar.validate(param)
        verdict = self._known(grammar)
        _raise(verdict.result() if isinstance(verdict, Future) else verdict, param)

    def close(self) -> None:
        """End its processes, once no step uses them. Checks that still wait are cancelled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.close()
        for rows in self._rows:
            rows.close()

    def _known(self, grammar: Grammar) -> "str | Future[str | None] | None":
        """What is wrong with the grammar, or None, or the promise of that."""
        key = hashlib.sha256(f"{grammar.kind}:{grammar.source}".encode()).digest()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        if not self._places.acquire(blocking=False):
            raise GrammarBusy("Too many grammars wait to be compiled.")
        try:
            future = self._thread.submit(self._verdict, key, grammar)
        except RuntimeError as error:
            self._places.release()
            raise GrammarBusy("The grammar compiler is closed.") from error
        # A caller who leaves cancels the future: its place is free again either way.
        future.add_done_callback(lambda _: self._places.release())
        return future

    def _start(self) -> None:
        try:
            self._process.start()
            # They start once, before anybody uses them; later they look after themselves.
            while self._unstarted:
                self._unstarted.pop().start()
        except ChildLost as error:
            raise GrammarBusy(f"The grammar process does not start: {error}") from error

    def _verdict(self, key: bytes, grammar: Grammar) -> str | None:
        with self._lock, contextlib.suppress(KeyError):
            return self._verdicts[key]
        self._start()
        self._process.send(Check(grammar))
        answer = self._process.receive()
        if answer is None:
            raise GrammarBusy("The grammar process was lost.")
        verdict = answer.reason if isinstance(answer, Refused | Crashed) else None
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict


def _raise(verdict: str | None, param: str) -> None:
    if verdict is not None:
        raise InvalidRequest(f"{param} cannot be served: {verdict}", param=param)
