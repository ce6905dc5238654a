"""Sequences of one class that wait to join, in the order in which they first came.

Those that were preempted came before all that never joined, so they stand in front.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from engine.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served. Nothing here takes longer when more sequences wait."""

    def __init__(self) -> None:
        # Not a plain dict: finding the first of one takes the longer, the more have left its front.
        self._new: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._new

    @property
    def head(self) -> Sequence | None:
        """Whose turn it is."""
        return self._preempted[0] if self._preempted else next(iter(self._new), None)

    def add(self, sequence: Sequence) -> None:
        """Join the end."""
        self._new[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """Return a preempted sequence to the place that it came from."""
        insort(self._preempted, sequence, key=lambda waiting: waiting.order)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        if sequence in self._new:
            del self._new[sequence]
        else:
            self._preempted.remove(sequence)
