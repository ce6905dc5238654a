"""Runs both embedded servers in a process of its own, so that a test can kill it or be another
user: `python -m tests.cli.embedded_servers DATA_DIR CLUSTER_HOME`. Prints one JSON line when they
are up; drains them when its standard input ends.
"""

import asyncio
import json
import sys
from pathlib import Path

from cli.embedded_postgres import prepare_postgres
from cli.embedded_valkey import prepare_valkey
from cli.restart_policy import RestartPolicy
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from cli.supervisor import Supervisor
from cli.system_user import database_user


async def main(data_dir: Path, cluster_home: Path) -> None:
    """Start, say so, wait, stop."""
    user = database_user()
    runtime = make_runtime_folder(data_dir, user)
    supervisor = Supervisor(data_dir / "logs", RestartPolicy(), print)
    try:
        postgres = await prepare_postgres(data_dir, runtime, user, cluster_home)
        await supervisor.add(postgres.child())
        await postgres.create_database()
        valkey = prepare_valkey(data_dir, runtime)
        await supervisor.add(valkey.child())
        started = {
            "database_url": postgres.url,
            "redis_url": valkey.url,
            "broker_url": valkey.broker_url,
            "pids": [supervisor.pid_of(name) for name in supervisor.names],
        }
        print(json.dumps(started), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await supervisor.stop()
        remove_runtime_folder(data_dir)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
