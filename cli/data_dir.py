"""The folder that one `headrace serve` owns: its lock, its secrets, its logs, its data.

serve.lock     held for as long as a serve runs on the folder
secrets.env    what was minted once and must outlive every start
serve.env      how to reach the servers of the serve that runs now
demo.env       base URL and keys for a first conversation
logs/          one file per child
run            points to the sockets
postgres, valkey, weights, files
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.env_file import read_env_file, write_env_file
from cli.errors import CommandFailed
from cli.settings import KEY_PEPPER

_PEPPER_BYTES = 32


class DataDirInUse(CommandFailed):
    """Another serve runs on this folder."""


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """Make the folder if there is none and own it. Raises DataDirInUse."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(data_dir / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode().strip()
            raise DataDirInUse(
                f"{data_dir} is in use by another headrace serve (process {owner}). "
                "Stop that one, or choose another folder with --data-dir."
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


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
