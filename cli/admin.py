"""`headrace admin`: tenants, keys and quotas, straight in the database.

Each change is written to the audit log in its own transaction, with the operating system's user.
"""

import typer

from cli.admin_keys import key
from cli.admin_quotas import quota
from cli.admin_tenants import tenant

admin = typer.Typer(help="Tenants, their keys and their quotas.", no_args_is_help=True)
admin.add_typer(tenant, name="tenant")
admin.add_typer(key, name="key")
admin.add_typer(quota, name="quota")
