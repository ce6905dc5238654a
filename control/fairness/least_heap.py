"""The member with the least key, where keys change all the time."""

import heapq
from collections.abc import Callable, Set


class LeastHeap:
    """Names, ordered by what `key` says of them now; ties go to the lesser name.

    A name whose key has changed must be pushed again. What was pushed before is then stale: it
    is dropped when it comes to the top, or when more is stale than not.
    """

    def __init__(self, key: Callable[[str], float]) -> None:
        self._key = key
        self._members: set[str] = set()
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def push(self, name: str) -> None:
        """Take a name in, or note that its key has changed."""
        self._members.add(name)
        heapq.heappush(self._heap, (self._key(name), name))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(self._key(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Forget a name; harmless if it is not here."""
        self._members.discard(name)

    def least(self) -> str | None:
        """The name with the least key, or None if there is none."""
        while self._heap:
            key, name = self._heap[0]
            if name in self._members and key == self._key(name):
                return name
            heapq.heappop(self._heap)
        return None

    def check(self, names: Set[str]) -> None:
        """These and no others are here, each in the heap under its present key."""
        assert self._members == names
        assert {(self._key(name), name) for name in names} <= set(self._heap)
