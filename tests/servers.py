"""Real PostgreSQL and Valkey for the tests, started as `headrace serve` starts them."""

import asyncio
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from cli.embedded_postgres import EmbeddedPostgres, prepare_postgres
from cli.embedded_valkey import EmbeddedValkey, prepare_valkey
from cli.restart_policy import RestartPolicy
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from cli.supervisor import Supervisor
from cli.system_user import database_user
from control.database.migrate import upgrade


@dataclass(slots=True)
class Servers:
    """A running PostgreSQL and Valkey."""

    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey
    numbers: Iterator[int]
    supervisor: Supervisor

    def new_database(self) -> str:
        """The URL of a fresh database with all tables."""
        name = f"test_{next(self.numbers)}"
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        url = self.postgres.url.replace("/headrace?", f"/{name}?")
        upgrade(url)
        return url


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Start both servers in folders of their own; stop and remove them at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    folder.chmod(0o711)
    data_dir = folder / "data"
    data_dir.mkdir()
    supervisor = Supervisor(folder / "logs", RestartPolicy(), print)

    async def start() -> Servers:
        user = database_user()
        runtime = make_runtime_folder(data_dir, user)
        postgres = await prepare_postgres(data_dir, runtime, user, folder / "clusters")
        valkey = prepare_valkey(data_dir, runtime)
        await supervisor.add(postgres.child())
        await postgres.create_database()
        await supervisor.add(valkey.child())
        return Servers(postgres, valkey, itertools.count(1), supervisor)

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    finally:
        asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result(60)
        remove_runtime_folder(data_dir)
        shutil.rmtree(folder, ignore_errors=True)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
