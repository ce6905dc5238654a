"""Files of `NAME=value` lines that only their owner may read: secrets, and how to reach servers.

A shell and any dotenv reader understand them the same way.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path


def read_env_file(path: Path) -> dict[str, str]:
    """The values by name; empty if there is no such file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    values = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not name.startswith("#"):
            values[name.strip()] = "".join(shlex.split(value))
    return values


def write_env_file(path: Path, values: Mapping[str, str]) -> None:
    """Replace the file in one step, readable by its owner alone, on disk before we return."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.writelines(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
