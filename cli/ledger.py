"""`headrace ledger`: whether the three counts agree, and what is wrong where they do not."""

import time
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection

from cli.administering import administration
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.table import print_table
from control.metering.balance import Balance
from control.metering.ledger import Violation, compare, read_violations
from control.metering.step_log import STEP_LOG_FOLDER

# Requests end while the counts are read; what disagrees for longer than this is wrong.
PATIENCE_S = 10.0
POLL_S = 1.0
MAX_SHOWN = 20

ledger = typer.Typer(help="The ledger against what was produced.", no_args_is_help=True)


@ledger.callback()
def group() -> None:
    """The ledger against what was produced."""


@ledger.command()
def verify(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    steps: Annotated[
        Path | None,
        typer.Option(help="Folder of the replicas' step logs; without it the data folder's."),
    ] = None,
) -> None:
    """Compare what was produced with what was delivered, wasted and billed, to the token.

    Exits with 1 where they differ or the ledger breaks one of its laws.
    """
    folder = steps or data_dir / STEP_LOG_FOLDER
    with administration(data_dir) as (connection, _):
        found, violations = _settled(connection, folder)
    _print(found, violations)
    if not found.is_even or violations:
        raise typer.Exit(1)


def _settled(connection: Connection, folder: Path) -> tuple[Balance, list[Violation]]:
    """The comparison, again for a while if it is off: counts move while requests end."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        found, violations = compare(connection, folder), read_violations(connection)
        is_well = found.is_even and not violations
        if is_well or time.monotonic() > give_up:
            return found, violations
        time.sleep(POLL_S)


def _print(found: Balance, violations: list[Violation]) -> None:
    wasted = sum(found.wasted.values())
    rows = [
        ("requests that have ended", found.num_requests),
        ("requests still open", found.num_open),
        ("requests whose first step logs are not here", len(found.untold)),
        ("tokens produced", found.produced),
        ("tokens delivered", found.delivered),
        ("tokens wasted", wasted),
        *((f"  {reason}", count) for reason, count in sorted(found.wasted.items())),
        ("tokens billed", found.billed),
        ("produced - delivered - wasted", found.produced - found.delivered - wasted),
        ("billed - delivered", found.billed - found.delivered),
        ("broken laws", len(violations)),
    ]
    print_table(("", "count"), [(name, str(count)) for name, count in rows])
    for off in found.off[:MAX_SHOWN]:
        attempt = off.produced
        typer.echo(
            f"request {attempt.request_id} attempt {attempt.attempt} on {attempt.replica_id}: "
            f"produced {attempt.num_tokens}, delivered {off.delivered}, wasted {off.wasted}",
            err=True,
        )
    for violation in violations[:MAX_SHOWN]:
        typer.echo(f"{violation.law}: {violation.request_id}: {violation.detail}", err=True)
