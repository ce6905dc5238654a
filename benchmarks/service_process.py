"""Servers in processes of their own, for benchmarks: `headrace serve`, or any other, on a free
port, ready when their health address answers.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

START_LIMIT_S = 300.0
LAST_WORDS = 4_000
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
    host, port = "127.0.0.1", free_port()
    command = [sys.executable, "-m", "cli.main", "serve", "--host", host, "--port", str(port)]
    command += ["--data-dir", str(data_dir), "--model", model]
    with tempfile.TemporaryDirectory() as clusters:
        # Run as root, PostgreSQL keeps its cluster where its own user can reach it.
        Path(clusters).chmod(0o711)
        environment = {
            "HEADRACE_TEST_BUILD": "1",
            "HEADRACE_CLUSTER_HOME": clusters,
            **(settings or {}),
        }
        url = f"http://{host}:{port}/health/ready"
        with running_server(command, environment, url) as process_id:
            yield ServiceProcess(host, port, _demo_key(data_dir), process_id)


@contextmanager
def running_server(
    command: Sequence[str], environment: Mapping[str, str], health_url: str
) -> Iterator[int]:
    """Start any server, wait until its health address answers, and stop it at the end.

    `environment` is added to ours. Yields the process id. Raises RuntimeError with the server's
    last words if it ends or is not ready in time.
    """
    with tempfile.TemporaryFile("a+b") as said:
        process = subprocess.Popen(  # noqa: S603 - a command of a benchmark
            command,
            env={**os.environ, **environment},  # noqa: TID251
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, health_url, said)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            # What it did not end itself goes with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, said: "IO[bytes]") -> None:
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            said.seek(0)
            last_words = said.read().decode(errors="replace")[-LAST_WORDS:]
            raise RuntimeError(f"The server ended: {last_words}")
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - a loopback URL
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"The server was not ready after {START_LIMIT_S} s")


def _demo_key(data_dir: Path) -> str:
    for line in (data_dir / "demo.env").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "HEADRACE_API_KEY":
            return value.strip("'\"")
    raise RuntimeError(f"{data_dir / 'demo.env'} holds no HEADRACE_API_KEY")
