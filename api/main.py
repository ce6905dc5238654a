"""The gateway process: `headrace gateway`."""

import logging
import sys

from redis.exceptions import RedisError

from api.app import create_app
from api.gateway import build_gateway
from api.server import make_server
from api.settings import BadSettings, GatewaySettings, read_settings
from control.streams.connection import UnsafeServer, check_server, connect


def main() -> None:
    """Serve until a signal. Refuses to start on unusable settings or unsafe stores."""
    try:
        settings = read_settings()
        _check_redis(settings)
    except (BadSettings, UnsafeServer) as error:
        sys.exit(f"The gateway does not start.\n{error}")
    _start_logging()
    gateway = build_gateway(settings)
    server = make_server(create_app(gateway), gateway.drain, settings)
    server.run()


def _check_redis(settings: GatewaySettings) -> None:
    url = settings.redis_url.get_secret_value()
    with connect(url) as client:
        try:
            check_server(url, client)
        except RedisError as error:
            raise UnsafeServer(f"The server at REDIS_URL cannot be asked: {error}") from error


def _start_logging() -> None:
    """One line for each event, to standard error; nothing a caller wrote is ever logged."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


if __name__ == "__main__":
    main()
