"""HTTP/1.1 from strangers, within limits that are checked before the app hears of a request.

    headers        whole within 10 s, at most 64 KiB and 100 of them, else 431 or a closed socket
    body           at least 1 KiB in every 10 s until it is complete
    unread body    64 MiB are thrown away after the answer, then the socket is closed
    silent reader  one that takes nothing for 25 s is gone, and so is one that the network lost
    half-close     a client that shuts its write side has hung up
    early request  one that comes before the answer is whole waits unparsed; one that came in one
                   piece with the request before it is dropped, and the socket closes

While an answer is under way the socket is always read, whatever was sent behind the request: only
a reader sees that the client has left. Trailers are dropped: what may be done is decided from the
headers. Broken framing is answered 400 in our error shape, and the socket is closed.
"""

import asyncio
import contextlib
import re
import socket
import time
from asyncio.events import TimerHandle
from http import HTTPStatus
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.envelope import BEGAN_AT
from control.protocol.error_object import CALLER, ErrorFace
from control.protocol.responses import to_json

# In a request's state: called if the connection is reset before its next request, which it is by
# a client that closes without having read all of the answer.
ON_RESET = "on_reset"
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
HEADER_LIMIT_S = 10.0
BODY_WINDOW_S = 10.0
MIN_BODY_BYTES = 1024
MAX_DISCARDED_BYTES = 64 * 2**20
READER_LIMIT_S = 25.0

_HOST = re.compile(rb"(\[[^\[\]/?#@\s]*\]|[\w.\-~!$&'()*+,;=%]*)(:[0-9]*)?", re.ASCII)
_MALFORMED = ErrorFace(400, CALLER, "invalid_http", "The request is not valid HTTP/1.1.")
_TOO_LARGE = ErrorFace(431, CALLER, "headers_too_large", "The request's headers are too large.")


class HeadersTooLarge(Exception):
    """The request's headers are over the limit."""


class InvalidHost(Exception):
    """The request has not the one valid Host header that HTTP/1.1 demands (RFC 9112, 3.2)."""


class TooEarly(Exception):
    """A next request begins while the answer to the last is under way."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection."""

    _receive_timer: TimerHandle | None = None
    _reader_timer: TimerHandle | None = None
    _is_in_headers = True
    _refusal = _MALFORMED
    _early = b""
    _num_framing_bytes = 0
    _num_parsed_headers = 0
    _num_parsed_bytes = 0
    _num_window_bytes = 0
    _num_discarded_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came; its first request must follow soon."""
        stream = cast("asyncio.Transport", transport)
        super().connection_made(stream)
        _set_user_timeout(stream)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_receiving()
        self.resume_writing()
        if isinstance(exc, ConnectionResetError) and self.scope is not None:
            on_reset = self.scope["state"].get(ON_RESET)
            if on_reset is not None:
                on_reset()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More bytes, of headers, of a body, or too early."""
        if self.transport.is_closing():
            return
        if self._is_answering():
            self._hold(data)
            return
        if self._is_in_headers and self._receive_timer is None:  # a kept connection's next request
            self._expect_headers()
        self._num_framing_bytes += len(data)
        super().data_received(data)
        # One endless header or trailer reaches no callback, so its bytes are counted as they come.
        if self._num_framing_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refusal = _TOO_LARGE
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused, unless an answer has begun: two would be mixed up."""
        del msg
        if self._is_answering():
            self._close_after_the_answer()
        elif not self._is_in_headers and self.cycle.response_started:
            self._stop_receiving()
            self.transport.close()
        else:
            self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_answering():
            raise TooEarly
        super().on_message_begin()
        self.scope["state"][BEGAN_AT] = time.monotonic()
        self._is_in_headers = True
        self._num_parsed_headers = 0
        self._num_parsed_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header is complete, or one trailer, which is dropped."""
        self._num_parsed_headers += 1
        self._num_parsed_bytes += len(name) + len(value)
        if self._num_parsed_headers > MAX_HEADERS or self._num_parsed_bytes > MAX_HEADER_BYTES:
            self._refusal = _TOO_LARGE
            raise HeadersTooLarge
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The app may start."""
        self._check_host()
        self._is_in_headers = False
        self._num_framing_bytes = 0
        self._num_discarded_bytes = 0
        super().on_headers_complete()
        self._stop_receiving()
        self._num_window_bytes = 0
        self._receive_timer = self.loop.call_later(BODY_WINDOW_S, self._check_body)

    def on_body(self, body: bytes) -> None:
        """More of a body."""
        self._num_framing_bytes = 0
        self._num_window_bytes += len(body)
        if self.cycle.response_complete:
            self._num_discarded_bytes += len(body)
            if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one has all the time of keep-alive to begin."""
        super().on_message_complete()
        self._stop_receiving()
        self._is_in_headers = True
        self._num_framing_bytes = 0

    def on_response_complete(self) -> None:
        """The answer is whole; what came too early for it has its turn."""
        super().on_response_complete()
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def pause_writing(self) -> None:
        """The client does not read what it was sent."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _is_answering(self) -> bool:
        """True from the end of a request to the end of its answer."""
        return self.cycle is not None and self._is_in_headers and not self.cycle.response_complete

    def _hold(self, data: bytes) -> None:
        """Keep what came too early, or drop all of it when it is too much."""
        if self.cycle.keep_alive and len(self._early) + len(data) <= MAX_HEADER_BYTES:
            self._early += data
            return
        self._close_after_the_answer()
        self._num_discarded_bytes += len(data)
        if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def _close_after_the_answer(self) -> None:
        self._early = b""
        self.cycle.keep_alive = False

    def _check_host(self) -> None:
        hosts = [value for name, value in self.headers if name == b"host"]
        is_missing = not hosts and self.parser.get_http_version() != "1.0"
        if is_missing or len(hosts) > 1 or not all(map(_HOST.fullmatch, hosts)):
            raise InvalidHost

    def _expect_headers(self) -> None:
        self._stop_receiving()
        self._receive_timer = self.loop.call_later(HEADER_LIMIT_S, self.transport.abort)

    def _check_body(self) -> None:
        # While the app itself has not made room, the client is not to blame.
        if self._num_window_bytes < MIN_BODY_BYTES and not self.flow.read_paused:
            self.transport.abort()
            return
        self._num_window_bytes = 0
        self._receive_timer = self.loop.call_later(BODY_WINDOW_S, self._check_body)

    def _stop_receiving(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _refuse(self, face: ErrorFace) -> None:
        self._stop_receiving()
        body = to_json(face.body)
        phrase = HTTPStatus(face.status).phrase
        head = (
            f"HTTP/1.1 {face.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _set_user_timeout(transport: asyncio.Transport) -> None:
    """Let the kernel give up on a peer that acknowledges nothing."""
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if connection is None or option is None:
        return
    with contextlib.suppress(OSError):  # not a TCP socket
        connection.setsockopt(socket.IPPROTO_TCP, option, int(READER_LIMIT_S * 1000))
