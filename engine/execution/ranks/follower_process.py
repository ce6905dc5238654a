"""The driver's end of one follower."""

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from engine.execution.ranks.channel import Channel
from engine.execution.ranks.join import HERE, READY, Join

_MODULE = "engine.execution.ranks.follower"
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# Between the end of a process's channel and that of the process.
_DYING_S = 0.5


class RankLost(Exception):
    """A rank ended, failed or hangs; the model cannot go on without it."""


class FollowerProcess:
    """Starts the process, which writes its log where the driver writes its own."""

    def __init__(self, join: Join) -> None:
        self._rank = join.rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=_PACKAGE_ROOT,
            )
        self.channel.send(msgspec.json.encode(join))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_here(self) -> None:
        """Wait until it is about to meet the others. Raises RankLost."""
        self._expect(HERE)

    def wait_until_ready(self) -> None:
        """Wait until its share is loaded. Raises RankLost."""
        self._expect(READY)

    def end_in_words(self) -> str:
        """Why it ended; call it when its channel has something to read."""
        return self._why(self.channel.receive())

    def kill(self) -> None:
        """End it at once: it keeps nothing that is worth saving."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def _expect(self, word: bytes) -> None:
        frame = self.channel.receive()
        if frame != word:
            raise RankLost(self._why(frame))

    def _why(self, said: bytes | None) -> str:
        who = f"Rank {self._rank} (process {self.pid})"
        if said is not None:
            return f"{who} failed: {said.decode(errors='replace')}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_DYING_S)
            if status < 0:
                return f"{who} was ended by {signal.Signals(-status).name}."
            return f"{who} ended with exit status {status}."
        return f"{who} has closed its channel."
