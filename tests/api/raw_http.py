"""HTTP as bytes on a socket, for what no client library would send."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def connected(port: int, timeout_s: float = 20) -> Iterator[socket.socket]:
    """A socket to the gateway."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        yield connection


def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Send the bytes; the status and all that came until the server closed, or was done."""
    with connected(port) as connection:
        # Refused in the middle of a flood: the answer may still be there.
        with suppress(OSError):
            connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """One answer with a length, or whatever comes until the end; status 0 if nothing came."""
    data = b""
    while not _is_complete(data):
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            break
        if not more:
            break
        data += more
    status = int(data.split(b" ", 2)[1]) if data else 0
    return status, data


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes, politely or not."""
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65536):
            data += more
    return data


def read_until(connection: socket.socket, words: bytes) -> bytes:
    """All that comes until the words have come."""
    data = b""
    while words not in data:
        more = connection.recv(65536)
        if not more:
            raise AssertionError(f"closed before {words!r}: {data!r}")
        data += more
    return data


def request(
    target: str,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> bytes:
    """A request whose target and headers are exactly these."""
    shown = {"Host": "gateway", "Content-Type": "application/json"}
    shown |= {"Content-Length": str(len(body))} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in shown.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def _is_complete(data: bytes) -> bool:
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return False
