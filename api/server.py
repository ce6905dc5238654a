"""The server: one process, one event loop, and an orderly end.

SIGTERM or SIGINT: no new connections; idle ones are closed at once; open answers have `drain_s`
to finish, then are told that the gateway restarts. Signals after the first change nothing, and
the process ends with status 0.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api.drain import Drain
from api.http_protocol import GatewayProtocol
from api.settings import GatewaySettings

LAST_WORDS_S = 5.0


class GatewayServer(uvicorn.Server):
    """Runs an app; `drain` is told when open answers must stop."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        end = asyncio.get_running_loop().call_later(self._drain_s, self._drain.end)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on the first signal. Unlike uvicorn, do not die of it after an orderly end."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Only the main thread may listen to signals.
            return

        def on_signal(signum: int, frame: FrameType | None) -> None:
            del signum, frame
            self.should_exit = True

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        yield


def make_server(app: FastAPI, drain: Drain, settings: GatewaySettings) -> GatewayServer:
    """The server for the app, not yet started."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=GatewayProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.gateway_drain_s + LAST_WORDS_S),
    )
    return GatewayServer(config, drain, settings.gateway_drain_s)
