"""Publishes what the engine said: tokens to text, one server-side call per step, no more.

The engine thread is never waited for and never waits for Redis: between them stands the bounded
queue of updates. Redis answers for each request whether this attempt may still speak for it.
"""

import logging
import queue
import threading
import time
from collections import deque

import redis
from redis.exceptions import RedisError

from control.faults import fault_point
from control.metering.settlement import WasteReason
from control.metering.step_log import StepLog
from control.streams.functions import Publication, invoke, step
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta
from engine.interface.sequence_update import SequenceUpdate
from engine.loop import EngineLoop
from workers.delivery import Delivery
from workers.delivery_table import DeliveryTable
from workers.retrying import retry_until_done
from workers.settler import Settler

RETRY_CANCEL_S = 0.02

log = logging.getLogger(__name__)


class Publisher:
    """Owns the publishing thread of a replica.

    `freed` is set whenever a request has left the table, so that its room can be announced.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: ModelKeys,
        parts: tuple[EngineLoop, DeliveryTable, Settler],
        steps: StepLog,
    ) -> None:
        self._client = client
        self._keys = keys
        self._loop, self._table, self._settler = parts
        self._steps = steps
        self._cancels: deque[tuple[str, int | None, bool]] = deque()
        self._abandoned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.tokens_total = 0
        self.freed = threading.Event()

    def start(self) -> None:
        """Begin publishing."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything that the stopped engine said is published."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._send_cancels()
            try:
                updates = self._loop.updates.get(RETRY_CANCEL_S if self._cancels else None)
            except queue.Empty:
                continue
            if updates is None:
                return
            self._publish(updates, time.monotonic())

    def _publish(self, updates: list[SequenceUpdate], now: float) -> None:
        self._log_step(updates)
        said: dict[str, list[GenerationDelta]] = {}
        touched: dict[str, Delivery] = {}
        for update in updates:
            delivery = self._table.get(update.request_id)
            if delivery is None:
                log.warning("update for unknown request %s", update.request_id)
                continue
            if update.message:
                log.error("request %s failed: %s", update.request_id, update.message)
            touched[update.request_id] = delivery
            self.tokens_total += len(update.token_ids)
            delta = delivery.take(update, now)
            if delta is not None:
                said.setdefault(update.request_id, []).append(delta)
            if update.end is None and update.choice in delivery.finished_choices:
                self._cancels.append((update.request_id, update.choice, True))
        if said:
            self._append(said, touched)
        for request_id, delivery in touched.items():
            if delivery.is_over:
                self._close(request_id, delivery)

    def _log_step(self, updates: list[SequenceUpdate]) -> None:
        """Write down what was produced, before anybody sees it."""
        produced: dict[str, int] = {}
        for update in updates:
            delivery = self._table.get(update.request_id) if update.token_ids else None
            if delivery is None:
                continue
            self._steps.begin(update.request_id, delivery.attempt, delivery.first_offset)
            so_far = produced.get(update.request_id, 0)
            produced[update.request_id] = so_far + len(update.token_ids)
        if produced:
            self._steps.step(produced)

    def _append(self, said: dict[str, list[GenerationDelta]], touched: dict[str, Delivery]) -> None:
        publications = []
        for request_id, deltas in said.items():
            if request_id in self._abandoned:
                touched[request_id].undeliver(deltas, WasteReason.MOVED)
            else:
                publications.append(touched[request_id].publication(deltas))
        if not publications:
            return
        call = step(self._keys, publications)
        fault_point("publish.before_step")
        replies = retry_until_done(lambda: invoke(self._client, call), RedisError)
        fault_point("publish.after_step")
        now = time.monotonic()
        for publication in publications:
            touched[publication.request_id].times.note_published(now)
        for publication, reply in zip(publications, replies, strict=True):
            if reply != b"ok":
                self._obey(publication, touched[publication.request_id], reply)

    def _obey(self, publication: Publication, delivery: Delivery, reply: bytes) -> None:
        """Stop a request that was cancelled, taken over, ended elsewhere, or lost by Redis."""
        request_id = publication.request_id
        if reply == b"gone":
            # Nobody else can end it now: its tokens so far are settled from memory.
            delivery.undeliver(publication.deltas, WasteReason.REQUEST_LOST)
            delivery.fail("request_lost")
        elif reply in (b"moved", b"ended"):
            delivery.undeliver(publication.deltas, WasteReason.MOVED)
            self._abandoned.add(request_id)
        else:
            delivery.times.note_cancel(None, time.monotonic(), self._loop.stats().steps_total)
        if not delivery.is_over:
            self._cancels.append((request_id, None, False))

    def _close(self, request_id: str, delivery: Delivery) -> None:
        self._table.remove(request_id)
        self.freed.set()
        self._steps.end(request_id)
        delivery.is_abandoned = request_id in self._abandoned
        self._abandoned.discard(request_id)
        self._settler.put(delivery)

    def _send_cancels(self) -> None:
        """Pass cancels to the engine while it takes them; the rest wait for its next step."""
        while self._cancels:
            request_id, choice, is_complete = self._cancels[0]
            if not self._loop.try_cancel(request_id, choice, is_complete=is_complete):
                return
            self._cancels.popleft()
