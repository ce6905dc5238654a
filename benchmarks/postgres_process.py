"""A PostgreSQL of a benchmark's own, set up as `headrace serve` sets up its embedded one."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.embedded_postgres import prepare_postgres
from cli.restart_policy import RestartPolicy
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from cli.schema import bring_schema_up_to_date
from cli.supervisor import Supervisor
from cli.system_user import database_user

START_LIMIT_S = 120.0


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a database with all tables; it is removed with its server."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    # Run as root, PostgreSQL is a user of its own, who must reach its cluster.
    folder.chmod(0o711)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    supervisor = Supervisor(folder / "logs", RestartPolicy(), lambda _: None)
    try:
        starting = asyncio.run_coroutine_threadsafe(_start(supervisor, folder), loop)
        url = starting.result(START_LIMIT_S)
        bring_schema_up_to_date(url)
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result(START_LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        remove_runtime_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)


async def _start(supervisor: Supervisor, folder: Path) -> str:
    user = database_user()
    runtime = make_runtime_folder(folder, user)
    postgres = await prepare_postgres(folder, runtime, user, folder / "clusters")
    await supervisor.add(postgres.child())
    await postgres.create_database()
    return postgres.url
