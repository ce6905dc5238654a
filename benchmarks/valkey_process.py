"""A Valkey of a benchmark's own, set up as `headrace serve` sets up its embedded one."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.exceptions import RedisError

from cli.embedded_valkey import prepare_valkey
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from control.streams.connection import connect

START_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class ValkeyProcess:
    """Where it listens, and a client for this process."""

    url: str
    client: redis.Redis

    def cpu_seconds(self) -> float:
        """Processor time that all its threads have used so far, by its own account."""
        info = self.client.info("cpu")
        assert isinstance(info, dict)
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


@contextmanager
def running_valkey() -> Iterator[ValkeyProcess]:
    """Start it in a folder of its own and remove it afterwards, with its log and all it held."""
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name)
        server = prepare_valkey(data_dir, make_runtime_folder(data_dir, None))
        spec = server.child()
        process = subprocess.Popen(  # noqa: S603 - the program of our own package
            spec.argv,
            cwd=spec.folder,
            env=dict(spec.environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        client = connect(server.url)
        try:
            _wait_until_ready(process, client)
            yield ValkeyProcess(server.url, client)
        finally:
            client.close()
            process.terminate()
            process.wait()
            remove_runtime_folder(data_dir)


def _wait_until_ready(process: "subprocess.Popen[bytes]", client: redis.Redis) -> None:
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            client.ping()
        except RedisError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"Valkey was not ready within {START_LIMIT_S:g} s")
