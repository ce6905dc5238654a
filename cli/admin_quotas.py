"""`headrace admin quota`: what a tenant may use of a model."""

from typing import Annotated

import typer

from cli.administering import TenantArgument, Yes, administration, confirm, every_page, named_tenant
from cli.data_dir import DEFAULT_DATA_DIR, DataDir
from cli.table import print_table
from control.identity.quotas import Limits, list_quotas

_MODEL_HELP = "A model's name; `*` is all models that have no quota of their own."

ModelArgument = Annotated[str, typer.Argument(help=_MODEL_HELP)]

quota = typer.Typer(help="What a tenant may use of a model.", no_args_is_help=True)


@quota.command("set")
def quota_set(  # noqa: PLR0913, PLR0917 - each is an option of the command
    tenant: TenantArgument,
    model: ModelArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, help="Requests at once, of all models: for `*` only."),
    ] = None,
    max_enqueued_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens that wait in batches.")
    ] = None,
) -> None:
    """Put limits in force in place of those there were; what is left out is not limited."""
    limits = Limits(tokens_per_minute, requests_per_minute, max_concurrent, max_enqueued_tokens)
    if limits == Limits():
        raise typer.BadParameter("Name a limit, or lift all with `headrace admin quota remove`.")
    with administration(data_dir) as (connection, acts):
        acts.set_quota(named_tenant(connection, tenant).tenant_id, model, limits)
    typer.echo(f"The quota of {tenant} for {model} is set.")


@quota.command("list")
def quota_list(tenant: TenantArgument, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """A tenant's quotas by model."""
    with administration(data_dir) as (connection, _):
        owner = named_tenant(connection, tenant).tenant_id
        quotas = every_page(lambda page: list_quotas(connection, owner, page), lambda q: q.model)
    rows = [
        (
            each.model,
            *(
                "" if limit is None else str(limit)
                for limit in (
                    each.limits.tokens_per_minute,
                    each.limits.requests_per_minute,
                    each.limits.max_concurrent,
                    each.limits.max_enqueued_tokens,
                )
            ),
        )
        for each in quotas
    ]
    print_table(("model", "tokens/min", "requests/min", "at once", "tokens in batches"), rows)


@quota.command("remove")
def quota_remove(
    tenant: TenantArgument,
    model: ModelArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    yes: Yes = False,
) -> None:
    """Lift a tenant's limits for a model."""
    with administration(data_dir) as (connection, _):
        owner = named_tenant(connection, tenant)
    confirm(f"Lift every limit of {owner.name} for {model}?", yes)
    with administration(data_dir) as (_, acts):
        acts.remove_quota(owner.tenant_id, model)
    typer.echo(f"The quota of {tenant} for {model} is lifted.")
