"""One page of a long list: so many after the one that ended the page before.

Lists are ordered by (created_at, id) and compared by both, so that equal times skip nothing, and
a cursor holds although what it names has changed.
"""

from dataclasses import dataclass
from typing import TypeVar

from engine.interface.errors import InvalidRequest

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100
MAX_SHOWN = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list: at most `limit`, after the id `after`."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None

    def cut(self, found: list[T]) -> tuple[list[T], bool]:
        """The page out of `limit + 1` that were read, and whether there are more."""
        return found[: self.limit], len(found) > self.limit


def bad_cursor(what: str, after: str) -> InvalidRequest:
    """What is said of every `after` that names nothing the caller can see."""
    return InvalidRequest(
        f"There is no {what} {after[:MAX_SHOWN]!a} to go on after.", param="after"
    )
