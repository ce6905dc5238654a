"""The engine's end of the matchers' process."""

from pathlib import Path

import msgspec

from engine.grammar.matcher_messages import Answer, Question
from engine.text.child_process import ChildLost, ChildProcess

_MODULE = "engine.grammar.matcher_child"
# Its libraries would start threads, which a fork does not survive.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_MAX_ANSWER_BYTES = 1 << 20
# The child keeps its own time, by the processor's clock; this is for a machine in distress.
_PATIENCE_S = 30.0


class MatcherProcess:
    """Sends questions and takes answers, in order; starts the child when it is not there.

    Not for two threads at once.
    """

    def __init__(self, folder: Path, cpu_limit_s: float, memory_bytes: int) -> None:
        self._arguments = [str(folder.absolute()), str(memory_bytes), str(cpu_limit_s)]
        self._child: ChildProcess | None = None
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

    def start(self) -> None:
        """Start the child, unless it is there, and wait until it is ready. Raises ChildLost."""
        if self._child is None:
            self._child = ChildProcess(_MODULE, self._arguments, _ENVIRONMENT)
        try:
            self._child.wait_until_ready()
        except ChildLost:
            self.close()
            raise

    def send(self, question: Question) -> None:
        """Ask; if the child is lost, `receive` will say so."""
        try:
            self.start()
            assert self._child is not None
            self._child.send(msgspec.msgpack.encode(question), _PATIENCE_S)
        except ChildLost:
            self.close()

    def receive(self) -> Answer | None:
        """The next answer, or None if the child is lost with all it knew."""
        if self._child is None:
            return None
        try:
            return self._decoder.decode(self._child.receive(_PATIENCE_S, _MAX_ANSWER_BYTES))
        except ChildLost:
            self.close()
            return None

    def close(self) -> None:
        """End the child; the next question starts another."""
        if self._child is not None:
            self._child.kill()
            self._child = None
