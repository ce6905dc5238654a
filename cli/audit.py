"""`headrace audit`: what administrators did, by HTTP and by command."""

import json
from typing import Annotated

import typer

from cli.administering import TENANT_HELP, administration, check_text, named_tenant
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.table import print_table
from control.identity.audit import AuditFilter, AuditRecord, list_audit
from control.identity.page import MAX_LIMIT, Page
from control.identity.tenants import MAX_NAME

audit = typer.Typer(help="What administrators did.", no_args_is_help=True)


@audit.callback()
def group() -> None:
    """What administrators did."""


@audit.command("list")
def audit_list(  # noqa: PLR0913, PLR0917 - each is an option of the command
    data_dir: DataDir = DEFAULT_DATA_DIR,
    tenant: Annotated[str | None, typer.Option(help=f"Whom it was done to. {TENANT_HELP}")] = None,
    action: Annotated[str | None, typer.Option(help="Such as key.revoke.")] = None,
    actor: Annotated[str | None, typer.Option(help="A key's id, or user@host.")] = None,
    object_id: Annotated[
        str | None, typer.Option("--object", help="A key's, tenant's or model's id.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT)] = 100,
    after: Annotated[str | None, typer.Option(help="Go on after this record.")] = None,
) -> None:
    """The newest records first."""
    for name, value in (("action", action), ("actor", actor), ("object", object_id)):
        check_text(name, value or "", 0, MAX_NAME)
    with administration(data_dir) as (connection, _):
        owner = None if tenant is None else named_tenant(connection, tenant).tenant_id
        only = AuditFilter(owner, action, actor, object_id)
        records, has_more = list_audit(connection, only, Page(limit, after))
    columns = ("record", "when (UTC)", "who", "what", "tenant", "object", "change", "request")
    print_table(columns, [_row(each) for each in records])
    if has_more:
        typer.echo(f"There are more: --after {records[-1].audit_id}", err=True)


def _row(record: AuditRecord) -> tuple[str, ...]:
    return (
        str(record.audit_id),
        f"{record.created_at:%Y-%m-%d %H:%M:%S}",
        record.actor_id,
        record.action,
        record.tenant_id or "",
        record.object_id,
        _change(record.before or {}, record.after or {}),
        record.request_id or "",
    )


def _change(before: dict[str, object], after: dict[str, object]) -> str:
    """Each field that differs, as `name: before -> after`."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(
        f"{name}: {json.dumps(before.get(name))} -> {json.dumps(after.get(name))}" for name in names
    )
