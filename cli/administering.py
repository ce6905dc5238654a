"""What the administering commands share: a transaction, who acts in it, and asking first.

Who acts is the operating system's user, by number and not by what the environment says.
"""

import os
import pwd
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from sqlalchemy import Connection

from cli.errors import CommandFailed
from cli.running_serve import setting
from cli.settings import DATABASE_URL
from cli.stores import failures_in_words
from control.database.connection import connect
from control.errors import NotFound
from control.identity.administration import Administration
from control.identity.authority import Administrator
from control.identity.keys import MAX_LIFE_S
from control.identity.page import MAX_LIMIT, Page
from control.identity.tenants import Tenant, find_tenant, find_tenant_by_name

TENANT_HELP = "A tenant's name or id."

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
TenantArgument = Annotated[str, typer.Argument(help=TENANT_HELP)]

_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

T = TypeVar("T")


@contextmanager
def administration(data_dir: Path) -> Iterator[tuple[Connection, Administration]]:
    """A transaction and what may be done in it; committed at the end of the block."""
    engine = connect(setting(DATABASE_URL, data_dir), "admin", pool_size=1)
    try:
        with failures_in_words(), engine.begin() as connection:
            yield connection, Administration(connection, person())
    finally:
        engine.dispose()


def person() -> Administrator:
    """Whoever runs this command: everything is open to a person who can reach the database."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid-{os.getuid()}"
    return Administrator("user", f"{user}@{socket.gethostname()}", None, None)


def named_tenant(connection: Connection, wish: str) -> Tenant:
    """The tenant of that id, or else of that name. Raises CommandFailed."""
    try:
        return find_tenant(connection, wish)
    except NotFound:
        # What an argument's bytes do not spell as text, PostgreSQL would not take.
        found = find_tenant_by_name(connection, wish) if is_text(wish) else None
    if found is None:
        raise CommandFailed(
            f"There is no tenant {wish!r}. `headrace admin tenant list` shows them all, "
            "`headrace admin tenant create` adds one."
        )
    return found


def every_page(read: Callable[[Page], tuple[list[T], bool]], id_of: Callable[[T], str]) -> list[T]:
    """A whole list, read page by page."""
    found, has_more = read(Page(MAX_LIMIT))
    while has_more:
        page, has_more = read(Page(MAX_LIMIT, id_of(found[-1])))
        found += page
    return found


def check_text(what: str, value: str, least: int, most: int) -> None:
    """Raise CommandFailed for what cannot be a name or the like."""
    if not least <= len(value) <= most or not value.isprintable():
        raise CommandFailed(f"The {what} must have {least} to {most} printable characters.")


def is_text(value: str) -> bool:
    """False of an argument whose bytes are no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def confirm(question: str, is_certain: bool) -> None:
    """Ask a person before what cannot be taken back. Raises CommandFailed without a yes.

    Never within a transaction: people think for longer than a session may idle in one.
    """
    if is_certain:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(f"{question} Add --yes to do it without being asked.")
    if not typer.confirm(question):
        raise CommandFailed("Nothing was changed.")


def seconds_of(duration: str | None) -> int | None:
    """Seconds of `90d`, `12h`, `30m` or `45s`; None of None, 0 of `0`. Raises BadParameter."""
    if duration is None:
        return None
    if duration == "0":
        return 0
    match = _DURATION.fullmatch(duration)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_LIFE_S:
        raise typer.BadParameter(
            f"{duration!r} is no time such as 90d, 12h, 30m or 45s, of at most ten years."
        )
    return seconds
