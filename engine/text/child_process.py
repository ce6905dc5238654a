"""A child process that works in the place of a thread, because it can be killed.

Parent and child speak in frames over the child's stdin and stdout: a big-endian length of four
bytes and that many bytes. The first frame of a child is empty and says that it is ready.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LENGTH_BYTES = 4

_START_LIMIT_S = 20.0
_READ_BYTES = 1 << 16
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ChildLost(Exception):
    """The child did not answer in time, said too much, or is gone."""


class ChildProcess:
    """The process and its two pipes, which never block the parent for longer than a limit.

    `module` is run with the arguments, in an environment of its own, on no terminal: it has
    nothing to read and nobody to signal.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, our own arguments
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=dict(environment or {}),
            cwd=_PACKAGE_ROOT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._received = bytearray()
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait for the first frame. Raises ChildLost."""
        if not self._is_ready:
            self.receive(_START_LIMIT_S, 0)
            self._is_ready = True

    def exchange(self, request: bytes, limit_s: float, max_bytes: int) -> bytes:
        """The one answer to a request. Raises ChildLost."""
        deadline = time.monotonic() + limit_s
        self.send(request, limit_s)
        return self.receive(deadline - time.monotonic(), max_bytes)

    def send(self, request: bytes, limit_s: float) -> None:
        """Write a frame; the child must be reading. Raises ChildLost."""
        deadline = time.monotonic() + limit_s
        unsent = memoryview(len(request).to_bytes(LENGTH_BYTES, "big") + request)
        while unsent:
            try:
                unsent = unsent[os.write(self._input, unsent) :]
            except BlockingIOError:
                _wait(self._input, select.POLLOUT, deadline)
            except OSError as error:
                raise ChildLost("its process ended.") from error

    def receive(self, limit_s: float, max_bytes: int) -> bytes:
        """The next frame, of at most `max_bytes`. Raises ChildLost."""
        deadline = time.monotonic() + limit_s
        received = self._received
        expected = LENGTH_BYTES
        while True:
            if len(received) >= LENGTH_BYTES:
                expected = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
                if expected > LENGTH_BYTES + max_bytes:
                    raise ChildLost("its answer is too long.")
            if len(received) >= expected:
                frame = bytes(received[LENGTH_BYTES:expected])
                del received[:expected]
                return frame
            _wait(self._output, select.POLLIN, deadline)
            piece = os.read(self._output, _READ_BYTES)
            if not piece:
                raise ChildLost("its process ended, most likely for want of memory.")
            received += piece

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        # Popen's own end of life: reaps the process and closes both pipes.
        with self._process:
            pass


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(descriptor, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise ChildLost("it took too long.")
