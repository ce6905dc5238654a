"""`headrace admin`: tenants and keys, straight in the database.

A key is printed once, on standard output alone, so that it can be piped to where it belongs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection

from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.errors import CommandFailed
from cli.running_serve import setting
from cli.settings import DATABASE_URL, KEY_PEPPER, pepper_bytes
from cli.stores import failures_in_words
from cli.table import print_table
from control.database.connection import connect
from control.identity.keys import SCOPES, create_key, list_keys, revoke_key
from control.identity.tenants import create_tenant, list_tenants

_DEFAULT_SCOPES = ("inference", "batch", "usage")
_TENANT_HELP = "A tenant's name or id."

admin = typer.Typer(help="Tenants and their keys.", no_args_is_help=True)
tenant = typer.Typer(help="Who is served, limited and billed.", no_args_is_help=True)
key = typer.Typer(help="What a tenant's programs authenticate with.", no_args_is_help=True)
admin.add_typer(tenant, name="tenant")
admin.add_typer(key, name="key")


@tenant.command("create")
def tenant_create(name: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Add a tenant; prints its id."""
    with _transaction(data_dir) as connection:
        created = create_tenant(connection, name)
    typer.echo(created.tenant_id)


@tenant.command("list")
def tenant_list(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """All tenants, oldest first."""
    with _transaction(data_dir) as connection:
        tenants = list_tenants(connection)
    rows = [(each.tenant_id, each.name, f"{each.created_at:%Y-%m-%d %H:%M}") for each in tenants]
    print_table(("tenant", "name", "created (UTC)"), rows)


@key.command("create")
def key_create(
    tenant: Annotated[str, typer.Argument(help=_TENANT_HELP)],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    scope: Annotated[
        list[str],
        typer.Option(help=f"What the key may do: one of {', '.join(SCOPES)}. May be repeated."),
    ] = list(_DEFAULT_SCOPES),  # noqa: B006 - read only, and shown by --help
) -> None:
    """Mint a key for a tenant; it is shown this once."""
    scopes = frozenset(scope)
    if unknown := sorted(scopes.difference(SCOPES)):
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(SCOPES)}.")
    pepper = pepper_bytes(setting(KEY_PEPPER, data_dir))
    with _transaction(data_dir) as connection:
        record, secret = create_key(connection, pepper, _tenant_id(connection, tenant), scopes)
    typer.echo(f"{record.key_id} ({', '.join(sorted(record.scopes))})", err=True)
    typer.echo(secret)


@key.command("list")
def key_list(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    tenant: Annotated[
        str | None, typer.Option(help=f"Only this tenant's keys. {_TENANT_HELP}")
    ] = None,
) -> None:
    """Keys without their secrets, oldest first."""
    with _transaction(data_dir) as connection:
        keys = list_keys(connection, None if tenant is None else _tenant_id(connection, tenant))
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
def key_revoke(
    key_id: Annotated[str, typer.Argument(help="As `key list` shows it: key_...")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Refuse a key from now on (gateways follow within seconds)."""
    with _transaction(data_dir) as connection:
        known = {key.key_id: key for key in list_keys(connection)}
        is_new = revoke_key(connection, key_id)
    if key_id not in known:
        raise CommandFailed(f"There is no key {key_id}. `headrace admin key list` shows them all.")
    revoked_at = known[key_id].revoked_at
    if not is_new and revoked_at is not None:
        raise CommandFailed(
            f"{key_id} has been revoked already, at {revoked_at:%Y-%m-%d %H:%M} UTC."
        )
    typer.echo(f"{key_id} is revoked.")


def _tenant_id(connection: Connection, wish: str) -> str:
    """The id of the tenant of that id, or else of that name. Raises CommandFailed."""
    tenants = list_tenants(connection)
    known = {each.name: each.tenant_id for each in tenants}
    known |= {each.tenant_id: each.tenant_id for each in tenants}
    if wish not in known:
        raise CommandFailed(
            f"There is no tenant {wish!r}. `headrace admin tenant list` shows them all, "
            "`headrace admin tenant create` adds one."
        )
    return known[wish]


@contextmanager
def _transaction(data_dir: Path) -> Iterator[Connection]:
    engine = connect(setting(DATABASE_URL, data_dir), "admin", pool_size=1)
    try:
        with failures_in_words(), engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()
