"""The requests that a replica has, from their assignment until they are handed to settlement.

Three threads meet here: the inbox adds, the publisher looks up and removes, the heartbeat reads
the load. The projection of a request counts from the moment it is assigned, so that a snapshot
never promises room that an order on its way already needs.
"""

import threading
from dataclasses import dataclass

from workers.delivery import Delivery


@dataclass(frozen=True, slots=True)
class TableLoad:
    """What the requests here may come to need, and the last order that is counted."""

    kv_tokens: int
    num_sequences: int
    last_order: str


class DeliveryTable:
    """Deliveries by request id, with the load they stand for."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._deliveries: dict[str, Delivery] = {}
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

    def load(self) -> TableLoad:
        """Projected KV tokens, in whole blocks, and sequences of everything here."""
        with self._lock:
            requests = [delivery.request for delivery in self._deliveries.values()]
            last_order = self._last_order
        num_sequences = sum(request.num_choices for request in requests)
        kv_tokens = sum(request.max_kv_tokens for request in requests)
        # Each sequence may leave its last block partly empty.
        return TableLoad(kv_tokens + num_sequences * self._block_size, num_sequences, last_order)
