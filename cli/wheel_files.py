"""Finds server programs that Python packages carry, without running those packages' code."""

from importlib.util import find_spec
from pathlib import Path

from cli.errors import CommandFailed


class ServerProgramMissing(CommandFailed):
    """The package that carries an embedded server is not installed, or not for this machine."""


def folder_of(package: str, set_instead: str) -> Path:
    """Where an installed package's files lie; `set_instead` is the setting that avoids it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServerProgramMissing(
            f"The package {package} is not installed. Install requirements/run.txt, "
            f"or set {set_instead} to a server of your own."
        )
    return Path(spec.submodule_search_locations[0])


def check_program(program: Path, set_instead: str) -> Path:
    """The program, if it is there. Raises ServerProgramMissing."""
    if not program.is_file():
        raise ServerProgramMissing(
            f"There is no {program}: the package has no build for this machine. "
            f"Set {set_instead} to a server of your own."
        )
    return program
