"""Frames between the driver and a follower, over a pair of connected sockets.

A frame is a big-endian length of eight bytes and that many bytes. The end of one process is the
end of the other's channel, at once and however it died: that is how each learns of it.
"""

import select
import socket

_LENGTH_BYTES = 8


class Channel:
    """One end. Sending waits for room; one thread sends, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """For `select`: readable when a frame has come or the other end is gone."""
        return self._connection.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame. Raises OSError when the other end is gone."""
        self._connection.sendall(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    def receive(self) -> bytes | None:
        """Wait for the next frame; None when the other end is gone."""
        header = self._exactly(_LENGTH_BYTES)
        return None if header is None else self._exactly(int.from_bytes(header, "big"))

    def wait_for_end(self) -> None:
        """Return when the other end is gone, whatever is still to be read."""
        poller = select.poll()
        poller.register(self._connection, 0)
        poller.poll()

    def close(self) -> None:
        """Let the other end see the end."""
        self._connection.close()

    def _exactly(self, num_bytes: int) -> bytes | None:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                piece = self._connection.recv(num_bytes - len(received))
            except ConnectionError:
                return None
            if not piece:
                return None
            received += piece
        return bytes(received)
