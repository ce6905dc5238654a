"""The gateway process: `headrace gateway`."""

import logging
import sys

from api.app import create_app
from api.gateway import build_gateway
from api.server import make_server
from api.settings import read_settings
from control.faults import arm
from control.starting import check_redis, refusing_to_start


def main() -> None:
    """Serve until a signal. Refuses to start on unusable settings or unsafe stores."""
    with refusing_to_start("gateway"):
        settings = read_settings()
        arm(settings.fault, is_test_build=settings.test_build)
        check_redis(settings.redis_url.get_secret_value())
    _start_logging()
    gateway = build_gateway(settings)
    server = make_server(create_app(gateway), gateway.drain, settings)
    server.run()


def _start_logging() -> None:
    """One line for each event, to standard error; nothing a caller wrote is ever logged."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


if __name__ == "__main__":
    main()
