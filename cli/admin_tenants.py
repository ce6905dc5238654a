"""`headrace admin tenant`: who is served, limited and billed."""

from typing import Annotated

import typer

from cli.administering import (
    TenantArgument,
    Yes,
    administration,
    check_text,
    confirm,
    every_page,
    named_tenant,
)
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.table import print_table
from control.identity.tenants import MAX_NAME, list_tenants

tenant = typer.Typer(help="Who is served, limited and billed.", no_args_is_help=True)


@tenant.command("create")
def tenant_create(
    name: str,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    operator: Annotated[
        bool, typer.Option("--operator", help="Its admin keys administer every tenant.")
    ] = False,
) -> None:
    """Add a tenant; prints its id."""
    check_text("name", name, 1, MAX_NAME)
    with administration(data_dir) as (_, acts):
        created = acts.add_tenant(name, is_operator=operator)
    typer.echo(created.tenant_id)


@tenant.command("list")
def tenant_list(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """All tenants, oldest first."""
    with administration(data_dir) as (connection, _):
        tenants = every_page(lambda page: list_tenants(connection, page), lambda t: t.tenant_id)
    rows = [
        (
            each.tenant_id,
            each.name,
            f"{each.created_at:%Y-%m-%d %H:%M}",
            "operator" if each.is_operator else "",
            "" if each.suspended_at is None else f"{each.suspended_at:%Y-%m-%d %H:%M}",
        )
        for each in tenants
    ]
    print_table(("tenant", "name", "created (UTC)", "role", "suspended (UTC)"), rows)


@tenant.command("rename")
def tenant_rename(
    tenant: TenantArgument,
    name: Annotated[str, typer.Argument(help="The new name.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Give a tenant another name; its id stays."""
    check_text("name", name, 1, MAX_NAME)
    with administration(data_dir) as (connection, acts):
        renamed = acts.rename_tenant(named_tenant(connection, tenant).tenant_id, name)
    typer.echo(f"{renamed.tenant_id} is {renamed.name}.")


@tenant.command("suspend")
def tenant_suspend(
    tenant: TenantArgument, data_dir: DataDir = DEFAULT_DATA_DIR, yes: Yes = False
) -> None:
    """Refuse all keys of a tenant within seconds, until it is resumed."""
    with administration(data_dir) as (connection, _):
        found = named_tenant(connection, tenant)
    confirm(f"Refuse every key of {found.name} ({found.tenant_id})?", yes)
    with administration(data_dir) as (_, acts):
        acts.suspend_tenant(found.tenant_id)
    typer.echo(f"{found.tenant_id} is suspended.")


@tenant.command("resume")
def tenant_resume(tenant: TenantArgument, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Take a suspended tenant's keys again."""
    with administration(data_dir) as (connection, acts):
        resumed = acts.resume_tenant(named_tenant(connection, tenant).tenant_id)
    typer.echo(f"{resumed.tenant_id} is served.")
