"""Who must have ended by when.

A heap of instants. Ended sequences leave their deadlines behind, since finding them in the heap
would cost more than skipping them; they are swept out when they are the greater part.
"""

import heapq
from collections.abc import Callable

from engine.scheduling.sequence import Sequence

# Below this many entries nothing is worth sweeping.
_MIN_SWEPT = 64
# How many entries there may be for each living sequence.
_MAX_PER_LIVING = 4


class Deadlines:
    """The deadlines of all living sequences, in seconds of the caller's monotonic clock."""

    def __init__(self, is_living: Callable[[Sequence], bool]) -> None:
        self._is_living = is_living
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, sequence: Sequence) -> None:
        """Watch a sequence until `deadline`; once per sequence."""
        heapq.heappush(self._heap, (deadline, sequence.order, sequence))

    def take_overdue(self, now: float) -> list[Sequence]:
        """The living sequences whose deadline is not after `now`, most overdue first; once each."""
        overdue = []
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence = heapq.heappop(self._heap)
            if self._is_living(sequence):
                overdue.append(sequence)
        return overdue

    def sweep(self, num_living: int) -> None:
        """Drop what ended sequences left behind, if it is the greater part."""
        if len(self._heap) > _MIN_SWEPT + _MAX_PER_LIVING * num_living:
            self._heap = [entry for entry in self._heap if self._is_living(entry[2])]
            heapq.heapify(self._heap)
