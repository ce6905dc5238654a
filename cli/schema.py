"""`headrace migrate`: brings the database's schema up to date, or says in words why not."""

from alembic.util import CommandError

from cli.errors import CommandFailed
from cli.stores import failures_in_words
from control.database.migrate import upgrade


class SchemaUnknown(CommandFailed):
    """There is no such revision, or the database is at one that this version does not know."""


def bring_schema_up_to_date(database_url: str, revision: str = "head") -> None:
    """Apply every migration up to `revision`. Raises SchemaUnknown and StoreUnusable."""
    try:
        with failures_in_words():
            upgrade(database_url, revision)
    except CommandError as error:
        raise SchemaUnknown(f"The schema cannot be brought up to {revision}: {error}") from error
