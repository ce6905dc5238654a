"""A short private folder for sockets, new at every start.

A socket's path must be shorter than 104 bytes, so it cannot lie in the data folder. The name is
random, so nobody can lie in wait for it; `<data-dir>/run` points to it, so that people and the
next start can find it.
"""

import os
import shutil
import tempfile
from pathlib import Path

from cli.system_user import SystemUser, can_enter

_LONGEST_SOCKET = "/postgres/.s.PGSQL.5432.lock"
_MAX_SOCKET_PATH = 103
_PREFIX = "headrace-"
_RANDOM_LENGTH = 8
_FALLBACK = Path("/tmp")  # noqa: S108 - short on every system; the folder inside is private


def make_runtime_folder(data_dir: Path, guest: SystemUser | None) -> Path:
    """A new folder for sockets, in place of the last start's.

    Only we can list it; `guest`, if any, may pass through to the folders of its own in it.
    """
    remove_runtime_folder(data_dir)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base(guest)))
    if guest is not None:
        folder.chmod(0o711)
    pointer = data_dir / "run"
    pointer.symlink_to(folder)
    return folder


def remove_runtime_folder(data_dir: Path) -> None:
    """Remove the folder that `<data-dir>/run` points to, if it is one of ours, and the pointer."""
    pointer = data_dir / "run"
    if not pointer.is_symlink():
        return
    folder = pointer.readlink()
    is_ours = folder.name.startswith(_PREFIX) and folder.is_dir() and not folder.is_symlink()
    if is_ours and folder.stat().st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)
    pointer.unlink()


def _base(guest: SystemUser | None) -> Path:
    """The temporary folder, unless its path is too long or closed to the guest."""
    base = Path(tempfile.gettempdir())
    longest = len(os.fsencode(base)) + 1 + len(_PREFIX) + _RANDOM_LENGTH + len(_LONGEST_SOCKET)
    is_open = guest is None or can_enter(guest, base)
    return base if longest <= _MAX_SOCKET_PATH and is_open else _FALLBACK
