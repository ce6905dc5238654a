"""A whole service in processes of its own, for benchmarks: `headrace serve` on a free port."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """Where the service listens and a key for it."""

    host: str
    port: int
    api_key: str
    process_id: int


@contextmanager
def running_service(
    data_dir: Path, model: str = "scripted", settings: dict[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """Start `headrace serve`, wait until it is ready, and stop it at the end."""
    host, port = "127.0.0.1", _free_port()
    command = [sys.executable, "-m", "cli.main", "serve", "--host", host, "--port", str(port)]
    command += ["--data-dir", str(data_dir), "--model", model]
    with tempfile.TemporaryDirectory() as clusters, tempfile.TemporaryFile() as said:
        # Run as root, PostgreSQL keeps its cluster where its own user can reach it.
        Path(clusters).chmod(0o711)
        environment = {
            **os.environ,  # noqa: TID251
            "HEADRACE_TEST_BUILD": "1",
            "HEADRACE_CLUSTER_HOME": clusters,
            **(settings or {}),
        }
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_ready(process, f"http://{host}:{port}/health/ready", said)
            yield ServiceProcess(host, port, _demo_key(data_dir), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_LIMIT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, said: "IO[bytes]") -> None:
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            said.seek(0)
            raise RuntimeError(f"The service ended: {said.read().decode()}")
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - a loopback URL
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"The service was not ready after {START_LIMIT_S} s")


def _demo_key(data_dir: Path) -> str:
    for line in (data_dir / "demo.env").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "HEADRACE_API_KEY":
            return value.strip("'\"")
    raise RuntimeError(f"{data_dir / 'demo.env'} holds no HEADRACE_API_KEY")
