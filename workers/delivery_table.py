"""The requests that a replica has, from their assignment until they are handed to settlement.

Three threads meet here: the inbox adds, the publisher looks up and removes, the heartbeat reads
the load. A request counts from the moment it is assigned, so that a snapshot never promises room
that an order on its way already needs. It counts as the engine counts it: what it is expected to
need, not what it might.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.interface.generation_request import GenerationRequest, PriorityClass
from workers.delivery import Delivery

# Scopes whose requests came last. Each takes some 70 bytes of every snapshot.
MAX_SCOPES = 64


@dataclass(frozen=True, slots=True)
class TableLoad:
    """What is here, and the last order that is counted.

    `unjoined_kv_tokens` is what those sequences are expected to need that do not run yet; what
    the others do, the engine knows best.
    """

    unjoined_kv_tokens: int
    num_sequences: int
    last_order: str


class DeliveryTable:
    """Deliveries by request id, with the load they stand for.

    `expected_tokens` says how many KV tokens a request is expected to need, over all choices.
    """

    def __init__(
        self, block_size: int, expected_tokens: Callable[[GenerationRequest], int]
    ) -> None:
        self._block_size = block_size
        self._expected_tokens = expected_tokens
        self._deliveries: dict[str, Delivery] = {}
        self._scopes: OrderedDict[str, None] = OrderedDict()
        self._last_order = "0-0"
        self._lock = threading.Lock()
        self._is_empty = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, delivery: Delivery) -> bool:
        """Take a request in. False if an attempt of it is still here."""
        with self._lock:
            if delivery.request.request_id in self._deliveries:
                return False
            self._deliveries[delivery.request.request_id] = delivery
            self._scopes[delivery.request.cache_scope] = None
            self._scopes.move_to_end(delivery.request.cache_scope)
            if len(self._scopes) > MAX_SCOPES:
                self._scopes.popitem(last=False)
            return True

    def get(self, request_id: str) -> Delivery | None:
        """The attempt that is here, or None."""
        return self._deliveries.get(request_id)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        with self._lock:
            self._deliveries.pop(request_id, None)
            if not self._deliveries:
                self._is_empty.notify_all()

    def note_order(self, order: str) -> None:
        """Say that every inbox entry up to this one is in the table or refused."""
        with self._lock:
            self._last_order = order

    def all(self) -> list[Delivery]:
        """Every delivery that is here now."""
        with self._lock:
            return list(self._deliveries.values())

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait for the last request to leave. False after `timeout_s`."""
        with self._lock:
            return self._is_empty.wait_for(lambda: not self._deliveries, timeout_s)

    def recent_scopes(self) -> tuple[str, ...]:
        """The cache scopes of the latest requests, each once."""
        with self._lock:
            return tuple(self._scopes)

    def load(self, num_running: int, priority_class: PriorityClass | None = None) -> TableLoad:
        """What is here while the engine runs `num_running` sequences: the oldest, as a rule.

        With a class, only what is of that class counts, on both sides.
        """
        with self._lock:
            requests = [
                delivery.request
                for delivery in self._deliveries.values()
                if priority_class in (None, delivery.request.priority_class)
            ]
            last_order = self._last_order
        num_sequences = sum(request.num_choices for request in requests)
        num_unjoined = num_sequences - num_running
        kv_tokens = 0
        for request in reversed(requests):
            if num_unjoined <= 0:
                break
            num_unjoined -= request.num_choices
            # Each sequence may leave its last block partly empty.
            kv_tokens += self._expected_tokens(request) + request.num_choices * self._block_size
        return TableLoad(kv_tokens, num_sequences, last_order)


def kv_tokens_free(num_slots: int, load: TableLoad, projected_free_tokens: int) -> int:
    """KV tokens that a replica may promise to others: all of them only if nothing is counted.

    `projected_free_tokens` is what the engine expects the running sequences to leave.
    """
    if load.num_sequences == 0:
        return num_slots
    return max(0, projected_free_tokens - load.unjoined_kv_tokens)
