"""Reads a model's JSON files field by field, and says which field of which file is wrong."""

import json
from dataclasses import dataclass
from pathlib import Path


class UnsupportedModel(ValueError):
    """The folder holds something that this engine cannot run faithfully; the text says what."""


@dataclass(frozen=True, slots=True)
class ConfigObject:
    """A JSON object whose fields are checked as they are read; absent and null are the same."""

    path: Path
    values: dict[str, object]

    def get(self, name: str) -> object:
        """The field as it is, or None."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not a positive integer.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not a positive number.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not true or false.")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not a string.")
        return value

    def array(self, name: str, length: int) -> list[object] | None:
        """A list of at least `length` entries, of which the first `length` are given, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise UnsupportedModel(f"{self.path}: {name} is not a list of {length} entries.")
        return value[:length]

    def object(self, name: str) -> "ConfigObject":
        """An object inside this one, empty if there is none."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{self.path}: {name} is {value!r}, not an object.")
        return ConfigObject(self.path, value)


def read_config(path: Path) -> ConfigObject:
    """Read one file; raises UnsupportedModel if it is missing or holds no JSON object."""
    if not path.is_file():
        raise UnsupportedModel(f"{path} is missing: a model folder needs it.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object.")
    return ConfigObject(path, value)
