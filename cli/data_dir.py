"""The folder that one `headrace serve` owns: its lock, its secrets, its logs, its data.

serve.lock     held for as long as a serve runs on the folder
secrets.env    what was minted once and must outlive every start
serve.env      the environment of the processes of the serve that runs now
demo.env       base URL and keys for a first conversation
logs/          one file per child
run            points to the sockets
postgres, valkey, weights, files
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cli.env_file import read_env_file, write_env_file
from cli.errors import CommandFailed
from cli.settings import KEY_PEPPER

DEFAULT_DATA_DIR = Path(".headrace")
DataDir = Annotated[
    Path,
    typer.Option(
        help="Folder of a running `headrace serve`; not needed where the environment says it all."
    ),
]

_LOCK = "serve.lock"
_PEPPER_BYTES = 32
_PATIENCE_S = 0.5
_PAUSE_S = 0.02


class DataDirInUse(CommandFailed):
    """Another serve runs on this folder."""


class DataDirUnusable(CommandFailed):
    """What was named as the data folder cannot be one, or not for us."""


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """Make the folder if there is none and own it. Raises DataDirInUse and DataDirUnusable."""
    descriptor = _open_lock(data_dir)
    try:
        if not _lock(descriptor):
            owner = os.pread(descriptor, 32, 0).decode().strip()
            raise DataDirInUse(
                f"{data_dir} is in use by another headrace serve (process {owner}). "
                "Stop that one, or choose another folder with --data-dir."
            )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_in_use(data_dir: Path) -> bool:
    """True if a serve runs on the folder. Raises DataDirUnusable if we may not know."""
    try:
        descriptor = os.open(data_dir / _LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(data_dir, error) from error
    try:
        # Shared, and for a moment only: a serve that starts meanwhile tries for longer.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def key_pepper(data_dir: Path) -> str:
    """The secret under which API keys are hashed: 32 bytes in hex, minted once per folder.

    Losing it makes every key void, so it is on disk before it is used.
    """
    path = data_dir / "secrets.env"
    known = read_env_file(path)
    if KEY_PEPPER not in known:
        known = {**known, KEY_PEPPER: secrets.token_hex(_PEPPER_BYTES)}
        write_env_file(path, known)
    return known[KEY_PEPPER]


def _open_lock(data_dir: Path) -> int:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(data_dir, error) from error


def _lock(descriptor: int) -> bool:
    """Take the lock. Whoever only asks (`is_in_use`) holds it for a moment: that is waited out."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _unusable(data_dir: Path, error: OSError) -> DataDirUnusable:
    file = next((path for path in (data_dir, *data_dir.parents) if path.is_file()), None)
    if file == data_dir:
        reason = "it is a file, not a folder"
    elif file is not None:
        reason = f"{file} is a file, not a folder"
    elif isinstance(error, PermissionError):
        reason = "this user may not use it"
    else:
        reason = (error.strerror or str(error)).lower()
    return DataDirUnusable(
        f"{data_dir} cannot be the data folder: {reason}. Choose another with --data-dir."
    )
