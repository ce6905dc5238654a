"""A proxy whose connections break after as many bytes of the answer as a test says."""

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

BUFFER_BYTES = 65536


class BreakingProxy:
    """Forwards to `target`. Connection n breaks, with a reset, after `breaks[n]` bytes came back;
    when no more breaks are wanted, it does not. With `answers` it says these instead.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.breaks: list[int] = []
        self.answers: list[bytes] = []
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._open: set[socket.socket] = set()

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self.num_connections += 1
                self._open.add(caller)
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        if self.answers:
            caller.recv(BUFFER_BYTES)
            caller.sendall(self.answers.pop(0))
            caller.shutdown(socket.SHUT_WR)
            # To close what is not read to its end would be a reset.
            while caller.recv(BUFFER_BYTES):
                pass
            caller.close()
            return
        server = socket.create_connection(("127.0.0.1", self.target))
        self._open.add(server)
        threading.Thread(target=_copy, args=(caller, server), daemon=True).start()
        left = self.breaks.pop(0) if self.breaks else None
        with suppress(OSError):
            while data := server.recv(BUFFER_BYTES):
                caller.sendall(data[:left])
                if left is not None:
                    left -= min(left, len(data))
                    if not left:
                        break
        if left == 0:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for connection in (caller, server):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            self._open.discard(connection)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(BUFFER_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
