"""A gateway on a loopback port, served by the real server on a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from api.app import create_app
from api.gateway import Gateway, build_gateway
from api.server import GatewayServer, make_server
from api.settings import GatewaySettings

PEPPER = bytes(range(32))


@dataclass(slots=True)
class LiveGateway:
    """A running gateway."""

    gateway: Gateway
    server: GatewayServer
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The base URL for SDKs."""
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self, timeout_s: float = 30) -> None:
        """End as on SIGTERM and wait."""
        self.server.should_exit = True
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise AssertionError("the gateway did not stop")


def gateway_settings(database_url: str, redis_url: str, **fields: object) -> GatewaySettings:
    """Settings for a test, without the environment."""
    return GatewaySettings.model_validate(
        {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "key_pepper": PEPPER.hex(),
            "port": 0,
            "gateway_drain_s": 0.2,
            **fields,
        }
    )


@contextmanager
def live_gateway(settings: GatewaySettings) -> Iterator[LiveGateway]:
    """Serve until the block ends."""
    gateway = build_gateway(settings)
    server = make_server(create_app(gateway), gateway.drain, settings)
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    started = threading.Event()
    startup = server.startup

    async def startup_and_tell(sockets: None = None) -> None:
        try:
            await startup(sockets)
        finally:
            started.set()

    server.startup = startup_and_tell  # type: ignore[method-assign,assignment]  # to wait for it
    thread.start()
    if not started.wait(30) or not server.started:
        raise AssertionError("the gateway did not start")
    live = LiveGateway(gateway, server, loop, thread)
    try:
        yield live
    finally:
        live.stop()
        loop.close()
