"""A whole `headrace serve`, seen from outside: an SDK, SQL, and the process table."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai
import psycopg

from benchmarks.service_process import ServiceProcess
from cli.env_file import read_env_file
from cli.settings import DATABASE_URL, SERVERS_FILE
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import read_snapshots
from control.streams.connection import connect
from control.streams.keys import ModelKeys


@dataclass(frozen=True, slots=True)
class LiveService:
    """A running service and the ways to look into it."""

    process: ServiceProcess
    data_dir: Path
    model: str

    def client(self, max_retries: int = 0, api_key: str | None = None) -> openai.OpenAI:
        """The official SDK, pointed at the service, with the demo key or another."""
        return openai.OpenAI(
            base_url=f"http://{self.process.host}:{self.process.port}/v1",
            api_key=api_key or self.process.api_key,
            max_retries=max_retries,
            timeout=60,
        )

    def run(self, *arguments: str) -> str:
        """What a `headrace` command on this service's data prints."""
        command = [sys.executable, "-m", "cli.main", *arguments, "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def sql(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Rows of a query on the service's own database."""
        servers = read_env_file(self.data_dir / SERVERS_FILE)
        with psycopg.connect(servers[DATABASE_URL]) as connection:
            return connection.execute(query.encode(), values).fetchall()

    def snapshots(self) -> list[ReplicaSnapshot]:
        """What the living replicas last said."""
        client = connect(read_env_file(self.data_dir / SERVERS_FILE)["REDIS_URL"])
        try:
            return list(read_snapshots(client, ModelKeys(self.model))[0].values())
        finally:
            client.close()

    def pid_of(self, command: str) -> int | None:
        """The process that runs `headrace <command>` for this service."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            is_command = arguments[-2:-1] == [command.encode()]
            if is_command and parent == self.process.process_id:
                return int(folder.name)
        return None


def until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds, looking again and again; fail after `seconds`."""
    give_up = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < give_up, f"not within {seconds} s"
        pause.wait(0.05)
