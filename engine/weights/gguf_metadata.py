"""Typed reading of a GGUF file's key-value pairs."""

from collections.abc import Mapping
from typing import Never


class GgufNotSupported(ValueError):
    """The file cannot be converted exactly; the message names what is in the way."""


class GgufMetadata:
    """The pairs of one file. Each reader raises GgufNotSupported naming key and file."""

    def __init__(self, values: Mapping[str, object], file_name: str) -> None:
        self._values = values
        self._file_name = file_name

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        """A string."""
        value = self._values.get(key)
        return value if isinstance(value, str) else self._refuse(key, "a string")

    def optional_text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        return self.text(key) if key in self else None

    def integer(self, key: str) -> int:
        """An integer."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            return self._refuse(key, "an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer, or None where the key is absent."""
        return self.integer(key) if key in self else None

    def number(self, key: str, default: float | None = None) -> float:
        """An integer or a float, as a float; `default` where the key is absent, if given."""
        value = self._values.get(key, default)
        return float(value) if isinstance(value, int | float) else self._refuse(key, "a number")

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where the key is absent."""
        value = self._values.get(key, default)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            return self._refuse(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
            return self._refuse(key, "a list of integers")
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of integers and floats, as floats."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(n, int | float) for n in value):
            return self._refuse(key, "a list of numbers")
        return [float(number) for number in value]

    def refuse(self, key: str) -> None:
        """Refuse the file if it has the key at all."""
        if key in self:
            raise GgufNotSupported(f"{self._file_name}: {key} is set, which is not served.")

    def require(self, key: str, expected: object) -> None:
        """Refuse the file if it has the key with another value."""
        value = self._values.get(key, expected)
        if value != expected:
            raise GgufNotSupported(
                f"{self._file_name}: {key} is {value!r}; only {expected!r} is converted."
            )

    def _refuse(self, key: str, kind: str) -> Never:
        state = "is not" if key in self else "is missing; it must be"
        raise GgufNotSupported(f"{self._file_name}: {key} {state} {kind}.")
