"""The requests of one model that wait for a replica, in the order in which they will be served.

Interactive requests come before batch ones; inside a class the one that arrived first comes
first, wherever it was queued again since. Pure bookkeeping: no clock, no Redis.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from control.streams.messages import QueueEntry
from engine.interface.generation_request import PriorityClass

_RANK = {PriorityClass.INTERACTIVE: 0, PriorityClass.BATCH: 1}


@dataclass(frozen=True, slots=True, order=True)
class _Ranked:
    rank: int
    arrival: float
    request_id: str


class WaitingRequests:
    """A priority queue that can also forget a request in its middle."""

    def __init__(self) -> None:
        self._entries: dict[str, QueueEntry] = {}
        self._heap: list[_Ranked] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: QueueEntry) -> None:
        """Let a request wait. One that waits already keeps its place."""
        if entry.request_id in self._entries:
            return
        self._entries[entry.request_id] = entry
        rank = _RANK[entry.priority_class]
        heapq.heappush(self._heap, _Ranked(rank, entry.arrival, entry.request_id))

    def discard(self, request_id: str) -> None:
        """Forget a request; harmless if it does not wait."""
        self._entries.pop(request_id, None)

    def head(self) -> QueueEntry | None:
        """The request to be served next, or None."""
        while self._heap:
            entry = self._entries.get(self._heap[0].request_id)
            if entry is not None:
                return entry
            heapq.heappop(self._heap)
        return None

    def expired(self, now: float) -> Iterator[QueueEntry]:
        """Requests whose deadline has passed."""
        return (entry for entry in list(self._entries.values()) if entry.deadline_at <= now)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._heap.clear()

    def check(self) -> None:
        """Every waiting request is in the heap."""
        ranked = {item.request_id for item in self._heap}
        assert self._entries.keys() <= ranked
