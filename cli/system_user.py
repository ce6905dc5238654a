"""Whom PostgreSQL runs as when we are root: it refuses to run as root itself.

A system user of our own, made once. Where none can be made (a read-only /etc, no useradd),
`nobody`, whom every system has. Nothing that exists is ever opened up for that user: what it
cannot reach is put where it can.
"""

import fcntl
import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cli.errors import CommandFailed

_OWN_USER = "headrace-db"
_LAST_RESORT = "nobody"


class NoUnprivilegedUser(CommandFailed):
    """We are root, and there is nobody else PostgreSQL could run as."""


@dataclass(frozen=True, slots=True)
class SystemUser:
    """A user of the operating system, by number."""

    uid: int
    gid: int


def database_user() -> SystemUser | None:
    """The user to run PostgreSQL as: None means as ourselves, which is right unless we are root.

    Raises NoUnprivilegedUser if we are root and no other user is to be had.
    """
    if os.geteuid() != 0:
        return None
    found = _look_up(_OWN_USER) or _made() or _look_up(_LAST_RESORT)
    if found is None:
        raise NoUnprivilegedUser(
            "PostgreSQL does not run as root, and no other user could be found or made. "
            "Start Headrace as an ordinary user, or set DATABASE_URL."
        )
    return found


def _made() -> SystemUser | None:
    """The user, made unless somebody else was faster.

    Two useradds at once may each make one, and the second then takes the first one's place.
    """
    with Path("/etc/passwd").open() as accounts:
        fcntl.flock(accounts, fcntl.LOCK_EX)
        if _look_up(_OWN_USER) is None:
            _create(_OWN_USER)
        return _look_up(_OWN_USER)


def can_enter(user: SystemUser, folder: Path) -> bool:
    """True if the user may pass through every folder down to and into `folder`."""
    resolved = folder.resolve()
    return all(_may_search(user, part) for part in (resolved, *resolved.parents))


def _may_search(user: SystemUser, folder: Path) -> bool:
    status = folder.stat()
    if status.st_uid == user.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == user.gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _look_up(name: str) -> SystemUser | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return SystemUser(entry.pw_uid, entry.pw_gid) if entry.pw_uid != 0 else None


def _create(name: str) -> None:
    useradd = shutil.which("useradd") or shutil.which("useradd", path="/usr/sbin:/sbin")
    if useradd is None:
        return
    command = [useradd, "--system", "--no-create-home", "--user-group"]
    command += ["--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", name]
    subprocess.run(command, check=False, capture_output=True)  # noqa: S603 - fixed words
