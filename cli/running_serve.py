"""What the other commands need of the service: from the environment, or from a serve that runs.

A running `headrace serve` leaves its environment in its data folder. A serve that was killed
leaves it too, so the folder's lock is asked whether anybody runs there.
"""

from pathlib import Path

from cli.data_dir import is_in_use
from cli.env_file import read_env_file
from cli.settings import SERVERS_FILE, SettingMissing, check, given


def setting(name: str, data_dir: Path) -> str:
    """A variable, usable as far as its form goes: from the environment before anything else.

    Raises SettingMissing.
    """
    value = given(name)
    if value is not None:
        return value
    folder = data_dir.absolute()
    if not is_in_use(folder):
        raise SettingMissing(
            f"No `headrace serve` is running on {folder} now, and {name} is not set. "
            f"Start one there, name the folder of one that runs with --data-dir, or set {name}."
        )
    value = read_env_file(folder / SERVERS_FILE).get(name)
    if not value:
        raise SettingMissing(
            f"The `headrace serve` on {folder} is starting or stopping. Wait until it is ready."
        )
    return check(name, value)
