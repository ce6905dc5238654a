"""`headrace admin key`: what a tenant's programs authenticate with.

A key is printed once, on standard output alone, so that it can be piped to where it belongs.
"""

from typing import Annotated

import typer

from cli.administering import (
    TENANT_HELP,
    TenantArgument,
    Yes,
    administration,
    check_text,
    confirm,
    every_page,
    named_tenant,
    seconds_of,
)
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.errors import CommandFailed
from cli.running_serve import setting
from cli.settings import KEY_PEPPER, pepper_bytes
from cli.table import print_table
from control.errors import NotFound
from control.identity.administration import MAX_ROTATION_GRACE_S
from control.identity.keys import (
    MAX_RESUME_GRACE_S,
    SCOPES,
    ApiKey,
    KeyWish,
    get_key,
    list_keys,
)
from control.identity.tenants import MAX_NAME

_COLUMNS = (
    "key",
    "tenant",
    "begins",
    "scopes",
    "created (UTC)",
    "revoked (UTC)",
    "name",
    "expires (UTC)",
    "last used (UTC)",
    "replaced by",
)
_DEFAULT_SCOPES = ("inference", "batch", "usage")

KeyArgument = Annotated[str, typer.Argument(help="As `key list` shows it: key_...")]
ExpiresIn = Annotated[
    str | None, typer.Option(help="When it ends: 90d, 12h, 30m or 45s from now. Default: never.")
]

key = typer.Typer(help="What a tenant's programs authenticate with.", no_args_is_help=True)


@key.command("create")
def key_create(
    tenant: TenantArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    scope: Annotated[
        list[str],
        typer.Option(help=f"What the key may do: one of {', '.join(SCOPES)}. May be repeated."),
    ] = list(_DEFAULT_SCOPES),  # noqa: B006 - read only, and shown by --help
    name: Annotated[str, typer.Option(help="What it is for, for people.")] = "",
    expires_in: ExpiresIn = None,
    resume_grace: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_RESUME_GRACE_S,
            help="Seconds that a request lives on after its connection broke.",
        ),
    ] = 0,
) -> None:
    """Mint a key for a tenant; it is shown this once."""
    scopes = frozenset(scope)
    if unknown := sorted(scopes.difference(SCOPES)):
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(SCOPES)}.")
    check_text("name", name, 0, MAX_NAME)
    pepper = pepper_bytes(setting(KEY_PEPPER, data_dir))
    with administration(data_dir) as (connection, acts):
        wish = KeyWish(scopes, name, acts.moment_in(seconds_of(expires_in)), resume_grace)
        record, secret = acts.mint_key(pepper, named_tenant(connection, tenant).tenant_id, wish)
    _show_once(record, secret)


@key.command("list")
def key_list(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    tenant: Annotated[
        str | None, typer.Option(help=f"Only this tenant's keys. {TENANT_HELP}")
    ] = None,
) -> None:
    """Keys without their secrets, oldest first."""
    with administration(data_dir) as (connection, _):
        owner = None if tenant is None else named_tenant(connection, tenant).tenant_id
        keys = every_page(lambda page: list_keys(connection, owner, page), lambda k: k.key_id)
    print_table(_COLUMNS, [_row(each) for each in keys])


@key.command("rotate")
def key_rotate(
    key_id: KeyArgument,
    grace: Annotated[str, typer.Option(help="How long the old key still works, such as 24h.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    expires_in: Annotated[
        str | None, typer.Option(help="When the new key ends. Default: when the old one would.")
    ] = None,
) -> None:
    """Replace a key: mints one that can do the same, and ends the old one after the grace."""
    grace_s = seconds_of(grace) or 0
    if grace_s > MAX_ROTATION_GRACE_S:
        raise typer.BadParameter("A grace is at most 30d.")
    pepper = pepper_bytes(setting(KEY_PEPPER, data_dir))
    with administration(data_dir) as (_, acts):
        expires_at = acts.moment_in(seconds_of(expires_in))
        old, new, secret = acts.rotate_key(pepper, key_id, grace_s, expires_at)
    typer.echo(f"{old.key_id} works until {old.expires_at:%Y-%m-%d %H:%M:%S} UTC.", err=True)
    _show_once(new, secret)


@key.command("revoke")
def key_revoke(key_id: KeyArgument, data_dir: DataDir = DEFAULT_DATA_DIR, yes: Yes = False) -> None:
    """Refuse a key from now on (gateways follow within seconds)."""
    with administration(data_dir) as (connection, _):
        try:
            found = get_key(connection, key_id)
        except NotFound:
            raise CommandFailed(
                f"There is no key {key_id}. `headrace admin key list` shows them all."
            ) from None
    if found.revoked_at is None:
        name = f" ({found.name})" if found.name else ""
        confirm(f"Refuse {key_id}{name} of {found.tenant_id} for ever?", yes)
    with administration(data_dir) as (_, acts):
        acts.revoke_key(key_id)
    typer.echo(f"{key_id} is revoked.")


def _show_once(record: ApiKey, secret: str) -> None:
    typer.echo(f"{record.key_id} ({', '.join(sorted(record.scopes))})", err=True)
    typer.echo(secret)


def _row(key: ApiKey) -> tuple[str, ...]:
    moments = (key.revoked_at, key.expires_at, key.last_used_at)
    revoked, expires, used = ("" if each is None else f"{each:%Y-%m-%d %H:%M}" for each in moments)
    return (
        key.key_id,
        key.tenant_id,
        f"{key.prefix}…",
        ", ".join(sorted(key.scopes)),
        f"{key.created_at:%Y-%m-%d %H:%M}",
        revoked,
        key.name,
        expires,
        used,
        key.replaced_by or "",
    )
