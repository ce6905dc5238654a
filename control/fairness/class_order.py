"""Which class is served next, when both have somebody waiting.

Interactive before batch, with two exceptions. Batch keeps a *floor*: while both wait, this share
of the service goes to batch, so that a busy day does not stop it. And batch grows *urgent*: a
request whose window closes soon stands with the interactive ones, by arrival.
"""

from collections.abc import Mapping

from control.streams.messages import QueueEntry
from engine.interface.generation_request import PriorityClass

# Of the service while both classes wait.
BATCH_FLOOR = 0.05
# A batch request is urgent in this last part of its life, and in no more than its last minutes.
URGENT_SHARE = 0.1
URGENT_S = 600.0


class ClassOrder:
    """Remembers what each class was served while both were waiting."""

    def __init__(self, batch_floor: float = BATCH_FLOOR, urgent_s: float = URGENT_S) -> None:
        if not 0.0 <= batch_floor < 1.0:
            raise ValueError(f"The batch floor is {batch_floor}; it must be in [0, 1).")
        self._batch_floor = batch_floor
        self._urgent_s = urgent_s
        # What batch is owed: grows with all service while both wait, shrinks with batch's own.
        self._owed_to_batch = 0.0

    def choose(self, heads: Mapping[PriorityClass, QueueEntry], now: float) -> PriorityClass:
        """The class to serve, of those that have somebody waiting."""
        if len(heads) == 1:
            return next(iter(heads))
        interactive = heads[PriorityClass.INTERACTIVE]
        batch = heads[PriorityClass.BATCH]
        if self._owed_to_batch > 0.0:
            return PriorityClass.BATCH
        if self._is_urgent(batch, now) and batch.arrival < interactive.arrival:
            return PriorityClass.BATCH
        return PriorityClass.INTERACTIVE

    def _is_urgent(self, batch: QueueEntry, now: float) -> bool:
        life_s = batch.deadline_at - batch.arrival
        return batch.deadline_at - now < min(self._urgent_s, URGENT_SHARE * life_s)

    def note(self, priority_class: PriorityClass, service: float, *, is_contested: bool) -> None:
        """A request of the class was served; `is_contested` if both classes were waiting."""
        if not is_contested:
            self._owed_to_batch = min(self._owed_to_batch, 0.0)
            return
        self._owed_to_batch += self._batch_floor * service
        if priority_class is PriorityClass.BATCH:
            self._owed_to_batch -= service
