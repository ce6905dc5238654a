"""`headrace admin`: tenants and keys, straight in the database.

A key is printed once, on standard output alone, so that it can be piped to where it belongs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from cli.errors import CommandFailed
from cli.settings import DATABASE_URL, KEY_PEPPER, default_data_dir, pepper_bytes, setting
from cli.table import print_table
from control.database.connection import connect
from control.identity.keys import SCOPES, create_key, list_keys, revoke_key
from control.identity.tenants import create_tenant, list_tenants

DataDir = Annotated[
    Path,
    typer.Option(
        default_factory=default_data_dir,
        help="Folder of a running `headrace serve`; not needed when DATABASE_URL is set.",
    ),
]

admin = typer.Typer(help="Tenants and their keys.", no_args_is_help=True)
tenant = typer.Typer(help="Who is served, limited and billed.", no_args_is_help=True)
key = typer.Typer(help="What a tenant's programs authenticate with.", no_args_is_help=True)
admin.add_typer(tenant, name="tenant")
admin.add_typer(key, name="key")


@tenant.command("create")
def tenant_create(name: str, data_dir: DataDir) -> None:
    """Add a tenant; prints its id."""
    with _transaction(data_dir) as connection:
        created = create_tenant(connection, name)
    typer.echo(created.tenant_id)


@tenant.command("list")
def tenant_list(data_dir: DataDir) -> None:
    """All tenants, oldest first."""
    with _transaction(data_dir) as connection:
        tenants = list_tenants(connection)
    rows = [(each.tenant_id, each.name, f"{each.created_at:%Y-%m-%d %H:%M}") for each in tenants]
    print_table(("tenant", "name", "created (UTC)"), rows)


@key.command("create")
def key_create(
    tenant_id: str,
    data_dir: DataDir,
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"May be repeated: {', '.join(SCOPES)}. Default: inference."),
    ] = None,
) -> None:
    """Mint a key for a tenant; it is shown this once."""
    scopes = frozenset(scope or ["inference"])
    if unknown := sorted(scopes.difference(SCOPES)):
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(SCOPES)}.")
    pepper = pepper_bytes(setting(KEY_PEPPER, data_dir))
    with _transaction(data_dir) as connection:
        record, secret = create_key(connection, pepper, tenant_id, scopes)
    typer.echo(f"{record.key_id} ({', '.join(sorted(record.scopes))})", err=True)
    typer.echo(secret)


@key.command("list")
def key_list(
    data_dir: DataDir,
    tenant_id: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
) -> None:
    """Keys without their secrets, oldest first."""
    with _transaction(data_dir) as connection:
        keys = list_keys(connection, tenant_id)
    rows = [
        (
            each.key_id,
            each.tenant_id,
            f"{each.prefix}…",
            ", ".join(sorted(each.scopes)),
            f"{each.created_at:%Y-%m-%d %H:%M}",
            "" if each.revoked_at is None else f"{each.revoked_at:%Y-%m-%d %H:%M}",
        )
        for each in keys
    ]
    print_table(("key", "tenant", "begins", "scopes", "created (UTC)", "revoked (UTC)"), rows)


@key.command("revoke")
def key_revoke(key_id: str, data_dir: DataDir) -> None:
    """Refuse a key from now on (gateways follow within seconds)."""
    with _transaction(data_dir) as connection:
        was_revoked = revoke_key(connection, key_id)
    if not was_revoked:
        typer.echo(f"There is no unrevoked key {key_id}.", err=True)
        raise typer.Exit(1)
    typer.echo(f"{key_id} is revoked.")


@contextmanager
def _transaction(data_dir: Path) -> Iterator[Connection]:
    engine = connect(setting(DATABASE_URL, data_dir), "admin", pool_size=1)
    try:
        with engine.begin() as connection:
            yield connection
    except OperationalError as error:
        raise CommandFailed(f"The database does not answer: {error.orig}") from error
    finally:
        engine.dispose()
