"""The whole service on one machine, in the foreground.

Servers first (embedded ones, or those that DATABASE_URL and REDIS_URL name), then the schema,
the model, a demo tenant, and the processes in the order in which they need each other. Ctrl-C
or SIGTERM drains them in the reverse order.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from cli import data_dir as data_dirs
from cli.demo_access import DemoAccess, grant_demo_access
from cli.embedded_postgres import prepare_postgres
from cli.embedded_valkey import prepare_valkey
from cli.env_file import write_env_file
from cli.listening_address import ListeningAddress
from cli.processes import Fleet, process_specs
from cli.progress import Progress
from cli.ready_block import ready_block
from cli.registering import put_in_force
from cli.restart_policy import RestartPolicy
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from cli.schema import bring_schema_up_to_date
from cli.served_model import find_model
from cli.settings import (
    SERVERS_FILE,
    Servers,
    ServeSettings,
    broker_beside,
    child_environment,
    pepper_bytes,
    service_environment,
)
from cli.stores import failures_in_words
from cli.supervisor import Supervisor, drain_on_signals
from cli.system_user import database_user
from control.database.connection import connect_async
from control.registry.model_version import ModelVersion
from control.starting import check_redis


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a person asks of `headrace serve`.

    `model` is a folder, or None for the demo model. `tensor_parallel` is over how many processes
    each replica splits it, or None to leave that to the environment.
    """

    address: ListeningAddress
    data_dir: Path
    model: str | None
    num_replicas: int
    tensor_parallel: int | None = None


async def serve(options: ServeOptions, settings: ServeSettings, progress: Progress) -> None:
    """Run the service until a signal asks it to drain; every child has ended on return."""
    stop_requested = drain_on_signals()
    with data_dirs.held(options.data_dir):
        supervisor = Supervisor(options.data_dir / "logs", RestartPolicy(), progress.say)
        try:
            starting = asyncio.create_task(_start(supervisor, options, settings, progress))
            stopping = asyncio.create_task(stop_requested.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            await stopping
        finally:
            stopping.cancel()
            if supervisor.names:
                progress.say(
                    "Stopping: requests in flight are finished or handed back. This may take up "
                    f"to {supervisor.longest_stop_s:g} s."
                )
            await supervisor.stop()
            remove_runtime_folder(options.data_dir)
            (options.data_dir / SERVERS_FILE).unlink(missing_ok=True)
            progress.say("Stopped.")


async def _start(
    supervisor: Supervisor, options: ServeOptions, settings: ServeSettings, progress: Progress
) -> None:
    servers = await _start_servers(supervisor, options.data_dir, settings, progress)
    with progress.step("database schema"):
        await asyncio.to_thread(bring_schema_up_to_date, servers.database_url)
    weight_store = settings.weight_store or options.data_dir / "weights"
    with progress.step("model"):
        model = await find_model(options.model, weight_store, settings.is_test_build, progress.say)
    access = await _register(servers, model, options)
    about = {
        "HEADRACE_DATA_DIR": str(options.data_dir),
        "HEADRACE_WEIGHT_STORE": str(weight_store),
        "HEADRACE_HOST": options.address.host,
        "HEADRACE_PORT": str(options.address.port),
        "HEADRACE_MODEL": model.pinned_name,
    }
    if options.tensor_parallel is not None:
        about["HEADRACE_TENSOR_PARALLEL"] = str(options.tensor_parallel)
    service = service_environment(servers, about)
    write_env_file(options.data_dir / SERVERS_FILE, service)
    environment = child_environment(service)
    fleet = Fleet(model.model, options.num_replicas, options.address)
    for spec in process_specs(environment, servers.redis_url, fleet):
        with progress.step(spec.name):
            await supervisor.add(spec)
    progress.show(ready_block(access, model.model, options.data_dir))


async def _start_servers(
    supervisor: Supervisor, data_dir: Path, settings: ServeSettings, progress: Progress
) -> Servers:
    """PostgreSQL and Redis: named by the settings, or embedded, each on its own."""
    user = None if settings.database_url else database_user()
    runtime = make_runtime_folder(data_dir, user)
    database_url, redis_url, broker_url = (
        settings.database_url,
        settings.redis_url,
        settings.broker_url,
    )
    if database_url is None:
        with progress.step("PostgreSQL"):
            postgres = await prepare_postgres(data_dir, runtime, user, settings.cluster_home)
            await supervisor.add(postgres.child())
            await postgres.create_database()
        database_url = postgres.url
    if redis_url is None:
        with progress.step("Valkey"):
            valkey = prepare_valkey(data_dir, runtime)
            await supervisor.add(valkey.child())
        redis_url, broker_url = valkey.url, broker_url or valkey.broker_url
    else:
        with failures_in_words():
            await asyncio.to_thread(check_redis, redis_url)
    return Servers(
        database_url=database_url,
        redis_url=redis_url,
        broker_url=broker_url or broker_beside(redis_url),
        key_pepper=settings.key_pepper or data_dirs.key_pepper(data_dir),
    )


async def _register(servers: Servers, model: ModelVersion, options: ServeOptions) -> DemoAccess:
    engine = connect_async(servers.database_url, "serve", pool_size=1)
    try:
        with failures_in_words():
            async with engine.begin() as connection:
                await connection.run_sync(put_in_force, model)
            async with engine.connect() as connection:
                return await grant_demo_access(
                    connection,
                    pepper_bytes(servers.key_pepper),
                    options.data_dir,
                    f"{options.address.origin}/v1",
                )
    finally:
        await engine.dispose()
