"""The process in which matchers live: `python -m engine.grammar.matcher_child`.

Two processes, in fact. The first reads the tokenizer once and then forks a worker, which has
everything at hand and answers on the same pipes (`matcher_messages.py`). The kernel bounds the
worker's memory, and for each answer its processor time, so a busy machine condemns nobody. When
the worker dies of a question, the first process says so and forks the next, in milliseconds.
It all ends when stdin closes.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from engine.grammar.grammar_matcher import GrammarMatcher
from engine.grammar.llguidance_source import GrammarRefused
from engine.grammar.matcher_messages import (
    Answer,
    Check,
    Crashed,
    Mask,
    Masks,
    Passed,
    Question,
    Refused,
    Row,
)
from engine.grammar.vocabulary import Vocabulary
from engine.interface.grammar import Grammar
from engine.text.child_process import LENGTH_BYTES
from engine.text.tokenizer import Tokenizer

_STDIN, _STDOUT = 0, 1
# Of the time for an answer that compiles a grammar, the part for one that only goes on.
_GOING_ON = 0.25
# Coming back to a long output takes longer than adding a token to it.
_TOKENS_PER_S = 20_000
_NUM_TRIED_TOKENS = 12


def main(arguments: list[str]) -> None:
    """Answer until stdin closes. Arguments: model folder, memory in bytes, seconds per answer."""
    vocabulary = _vocabulary(Path(arguments[0]))
    memory_bytes, limit_s = int(arguments[1]), float(arguments[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(b"")
    while True:
        worker = os.fork()
        if worker == 0:
            _Worker(vocabulary, limit_s).run()
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        reason = "it takes too much time" if is_slow else "it takes too much memory"
        _write(msgspec.msgpack.encode(Crashed(f"{reason} to follow; make it simpler.")))


def _vocabulary(folder: Path) -> Vocabulary | str:
    try:
        return Vocabulary(Tokenizer.from_folder(folder))
    except GrammarRefused as refusal:
        return str(refusal)


class _Worker:
    """Answers from its matchers; a vocabulary that is a reason refuses everything."""

    def __init__(self, vocabulary: Vocabulary | str, limit_s: float) -> None:
        self._vocabulary = vocabulary
        self._limit_s = limit_s
        self._matchers: dict[int, GrammarMatcher] = {}

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(Question)
        while (request := _read()) is not None:
            question = decoder.decode(request)
            if isinstance(question, Check):
                self._answer_check(question)
            elif isinstance(question, Masks):
                for row in question.rows:
                    self._answer_row(row)

    def _answer_check(self, question: Check) -> None:
        self._watch(1.0, 0)
        answer: Answer
        try:
            _try_out(self._matcher(question.grammar))
            answer = Passed()
        except GrammarRefused as refusal:
            answer = Refused(str(refusal))
        self._say(answer)

    def _answer_row(self, row: Row) -> None:
        token_ids = np.frombuffer(row.token_ids, np.int32).tolist()
        self._watch(_GOING_ON if row.grammar is None else 1.0, len(token_ids))
        answer: Answer
        try:
            if row.grammar is not None:
                self._matchers[row.place] = self._matcher(row.grammar)
            matcher = self._matchers[row.place]
            matcher.accept(token_ids)
            allowed = matcher.allowed()
            answer = Mask(allowed.words.tobytes(), allowed.may_end)
        except GrammarRefused as refusal:
            self._matchers.pop(row.place, None)
            answer = Refused(str(refusal))
        self._say(answer)

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        if isinstance(self._vocabulary, str):
            raise GrammarRefused(self._vocabulary)
        return GrammarMatcher(self._vocabulary, grammar)

    def _watch(self, share: float, num_tokens: int) -> None:
        """From here on, the answer may cost so much; nobody handles the signal of the end."""
        limit_s = share * self._limit_s + num_tokens / _TOKENS_PER_S
        signal.setitimer(signal.ITIMER_PROF, limit_s)

    def _say(self, answer: Answer) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(msgspec.msgpack.encode(answer))


def _try_out(matcher: GrammarMatcher) -> None:
    """Walk a little: most of what is too hard to follow shows at once."""
    for step in range(_NUM_TRIED_TOKENS):
        allowed = matcher.allowed()
        if allowed.must_end:
            return
        bits = np.unpackbits(allowed.words.view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits)
        matcher.accept([int(choices[(step + 1) * 2_654_435_761 % len(choices)])])


def _read() -> bytes | None:
    header = _read_exactly(LENGTH_BYTES)
    return None if header is None else _read_exactly(int.from_bytes(header, "big"))


def _read_exactly(num_bytes: int) -> bytes | None:
    # Without a buffer: what one worker has not taken belongs to the next.
    pieces = bytearray()
    while len(pieces) < num_bytes:
        piece = os.read(_STDIN, min(num_bytes - len(pieces), 1 << 20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


def _write(body: bytes) -> None:
    unsent = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while unsent:
        unsent = unsent[os.write(_STDOUT, unsent) :]


if __name__ == "__main__":
    main(sys.argv[1:])
