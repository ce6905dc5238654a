"""What every worker process does around its work: log, stop on a signal, end when broken."""

import logging
import signal
import sys
import threading
from types import FrameType


def start_logging() -> None:
    """Log to standard error, one line each, in UTC. Nothing a caller wrote is ever logged."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s")
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def stop_event() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; later ones change nothing."""
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop
