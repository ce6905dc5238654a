"""The `headrace` command: everything the service is, by name.

Each command imports what it runs when it runs, so that `--help` answers at once and no process
loads another's libraries.
"""

# ruff: noqa: PLC0415 - see above

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cli.admin import admin
from cli.audit import audit
from cli.bench import bench
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.errors import CommandFailed
from cli.ledger import ledger
from cli.running_serve import setting
from cli.settings import DATABASE_URL, REDIS_URL, ServeSettings
from control.errors import ServiceError
from engine.interface.errors import InvalidRequest

app = typer.Typer(
    help="LLM inference for teams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
weights = typer.Typer(help="The weight store.", no_args_is_help=True)
app.add_typer(admin, name="admin")
app.add_typer(audit, name="audit")
app.add_typer(ledger, name="ledger")
app.add_typer(weights, name="weights")
app.add_typer(bench, name="bench")

_BY_HAND = (
    "All are read from the environment. To add one to a running `headrace serve`: "
    "set -a; . .headrace/serve.env; set +a"
)


@app.command()
def serve(
    data_dir: Annotated[Path, typer.Option(help="Where everything is kept.")] = DEFAULT_DATA_DIR,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 8000,
    model: Annotated[
        str | None, typer.Option(help="A model folder. Without it: the demo model.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Copies of the model.")] = 1,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes that each copy's layers are split over."),
    ] = None,
) -> None:
    """Run the whole service on this machine, until Ctrl-C or SIGTERM.

    DATABASE_URL, REDIS_URL and CELERY_BROKER_URL, where set, name servers of your own in place
    of the embedded ones.
    """
    from rich.console import Console

    from cli.listening_address import ListeningAddress
    from cli.progress import Progress
    from cli.serve import ServeOptions, serve

    address = ListeningAddress.claim(host, port)
    options = ServeOptions(address, data_dir.absolute(), model, replicas, tensor_parallel)
    progress = Progress(Console(), time.monotonic)
    try:
        asyncio.run(serve(options, ServeSettings.from_environment(), progress))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CommandFailed(f"Cannot go on: {error.strerror or error}{where}.") from error


@app.command(epilog=_BY_HAND)
def gateway() -> None:
    """Answer HTTP; any number may run behind a load balancer.

    Needs DATABASE_URL, REDIS_URL and HEADRACE_KEY_PEPPER; CELERY_BROKER_URL, HEADRACE_DATA_DIR,
    HEADRACE_HOST and HEADRACE_PORT may be set.
    """
    from api.main import main

    main()


@app.command(epilog=_BY_HAND)
def dispatcher() -> None:
    """Give waiting requests to replicas; one leads, others stand by.

    Needs DATABASE_URL and REDIS_URL.
    """
    from workers.dispatcher import main

    main()


@app.command(epilog=_BY_HAND)
def replica() -> None:
    """Run one copy of a model.

    Needs DATABASE_URL, REDIS_URL, HEADRACE_DATA_DIR (for its step log) and HEADRACE_MODEL (a model
    in force, or name@version); HEADRACE_KV_TOKENS, HEADRACE_HOST_KV_TOKENS,
    HEADRACE_INTER_TOKEN_TARGET_MS, HEADRACE_DTYPE, HEADRACE_TENSOR_PARALLEL and
    HEADRACE_NUM_THREADS may be set.
    """
    from workers.replica import main

    main()


@app.command("batch-worker", epilog=_BY_HAND)
def batch_worker() -> None:
    """Work through batch jobs; any number may run, on nodes that may vanish.

    Needs DATABASE_URL, REDIS_URL, CELERY_BROKER_URL and HEADRACE_DATA_DIR (for its files);
    HEADRACE_BATCH_CONCURRENCY and HEADRACE_BATCH_WINDOW may be set.
    """
    from workers.batch_worker import main

    main()


@app.command(epilog=_BY_HAND)
def maintenance() -> None:
    """Rescue, settle and prune what others left behind.

    Needs DATABASE_URL, REDIS_URL, CELERY_BROKER_URL and HEADRACE_DATA_DIR.
    """
    from workers.maintenance import main

    main()


@app.command()
def migrate(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    revision: Annotated[str, typer.Option(help="Where to stop.")] = "head",
) -> None:
    """Bring the database's schema up to date."""
    from cli.schema import bring_schema_up_to_date

    bring_schema_up_to_date(setting(DATABASE_URL, data_dir), revision)


@app.command()
def status(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """What each replica last said of itself."""
    from cli.status import show_status

    show_status(setting(DATABASE_URL, data_dir), setting(REDIS_URL, data_dir))


@app.command()
def faults() -> None:
    """Where a process of a test build can be made to die, by HEADRACE_FAULT=NAME or NAME:N.

    N is the how manieth time the place is reached. `make test-faults` goes through all of them.
    """
    from cli.table import print_table
    from control.faults import FAULT_POINTS

    rows = [(name, point.process, point.meaning) for name, point in FAULT_POINTS.items()]
    print_table(("point", "process", "when it dies"), rows)


@weights.command()
def fetch(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    weight_store: Annotated[
        Path | None, typer.Option(help="Default: HEADRACE_WEIGHT_STORE, else the data folder's.")
    ] = None,
) -> None:
    """Fetch the demo model; prints its folder. A model that is there already is verified."""
    from workers.demo_model import DemoModelUnavailable, fetch_demo_model

    store = weight_store or ServeSettings.from_environment().weight_store
    store = store or data_dir / "weights"
    try:
        folder = fetch_demo_model(store, lambda text: typer.echo(text, err=True))
    except DemoModelUnavailable as error:
        raise CommandFailed(str(error)) from error
    typer.echo(str(folder))


@weights.command()
def register(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    model: Annotated[
        str | None, typer.Option(help="A model folder. Without it: the demo model.")
    ] = None,
) -> None:
    """Put a model in force, for processes that are started one by one; prints its name."""
    from cli.registering import register_model

    settings = ServeSettings.from_environment()
    version = register_model(
        setting(DATABASE_URL, data_dir),
        model,
        settings.weight_store or data_dir / "weights",
        settings.is_test_build,
        lambda text: typer.echo(text, err=True),
    )
    typer.echo(version.pinned_name)


def main() -> None:
    """Run the command line; what a person can mend is said in words, not as a traceback."""
    try:
        app()
    except (CommandFailed, ServiceError, InvalidRequest) as error:
        typer.echo(f"headrace: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
