"""The dispatcher's shell: reads the queues of each model and places requests on replicas.

One thread per model. A thread works only while it holds the model's lease, and every assignment
names its fencing token, so that a leader that was merely asleep can move nothing. All it knows
is rebuilt from Redis: entries stay in their queue until they are assigned.
"""

import logging
import secrets
import threading
import time
from typing import cast

import redis
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from control.admission.bucket import release
from control.database.connection import connect as connect_database
from control.fairness.class_order import ClassOrder
from control.fairness.fair_queue import FairQueue
from control.fairness.virtual_time import Rates, VirtualTime
from control.faults import arm, fault_point
from control.metering.ending import end_request
from control.metering.timings import CancelProof
from control.registry.store import load_registry
from control.routing.placement import (
    Load,
    Placement,
    expected_service,
    is_hopeless,
    load_of,
    place,
)
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import read_snapshots
from control.starting import check_redis, read_settings, refusing_to_start
from control.streams.clock import SharedClock
from control.streams.connection import connect
from control.streams.functions import assign, invoke, lead, set_clock
from control.streams.keys import ModelKeys
from control.streams.messages import QueueEntry, UnreadableMessage, read_ending, unpack_entry
from engine.interface.generation_delta import Usage
from engine.interface.generation_request import PriorityClass
from workers.process import start_logging, stop_event
from workers.settings import DispatcherSettings
from workers.sweep import Sweep

LEASE_MS = 3000
STANDBY_POLL_S = 0.5
IDLE_BLOCK_MS = 250
BUSY_BLOCK_MS = 10
READ_COUNT = 256
SWEEP_EVERY_S = 1.0
SNAPSHOT_LIFE_S = 0.25
RETRY_S = 0.2
REGISTRY_POLL_S = 1.0
RATES = Rates()

QueueReply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]

log = logging.getLogger(__name__)


class Dispatcher:
    """Dispatches one model while it leads, and stands by while another does."""

    def __init__(
        self, client: redis.Redis, database: Engine, model: str, clock: SharedClock
    ) -> None:
        self._client = client
        self._database = database
        self._keys = ModelKeys(model)
        self._clock = clock
        self._token = secrets.token_hex(16)
        self._is_leading = False
        self._virtual_time = VirtualTime()
        self._waiting = FairQueue(self._virtual_time, ClassOrder())
        self._last_read: dict[bytes | str | memoryview, bytes | str | int | memoryview] = {}
        self._orders: dict[str, list[tuple[tuple[int, int], QueueEntry]]] = {}
        self._snapshots: dict[str, ReplicaSnapshot] = {}
        self._snapshots_at = -SNAPSHOT_LIFE_S
        self._sweep = Sweep(client, database, self._keys, self._token)
        self._swept_at = -SWEEP_EVERY_S

    def run(self, stop: threading.Event) -> None:
        """Dispatch until told to stop. A store that is away is waited for."""
        while not stop.is_set():
            try:
                if self._lead():
                    self.turn()
                else:
                    stop.wait(STANDBY_POLL_S)
            except (RedisError, SQLAlchemyError) as error:
                log.warning("%s: a store is away: %s", self._keys.model, type(error).__name__)
                # Whoever flushed or restarted it may have taken the lease and the queues along.
                self._is_leading = False
                stop.wait(RETRY_S)

    def turn(self) -> None:
        """Read what is new, place what fits, and now and then look after the rest."""
        self._read_streams(BUSY_BLOCK_MS if len(self._waiting) else IDLE_BLOCK_MS)
        if len(self._waiting):
            self._expire()
            self._place_all()
        if time.monotonic() - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            self._sweep.run()

    def _lead(self) -> bool:
        reply = invoke(self._client, lead(self._keys, self._token, LEASE_MS))
        is_leading: bool = reply == b"leading"
        if is_leading and not self._is_leading:
            log.info("leading %s", self._keys.model)
            self._clock.synchronize(self._client)
            self._orders.clear()
            self._begin()
        self._is_leading = is_leading
        return is_leading

    def _begin(self) -> None:
        """Take up where the last leader left off: its clock, and all that waits."""
        times = cast("dict[bytes, bytes]", self._client.hgetall(self._keys.clock))
        self._virtual_time = VirtualTime({k.decode(): float(v) for k, v in times.items()})
        self._waiting = FairQueue(self._virtual_time, ClassOrder())
        streams = [*(self._keys.queue(c) for c in PriorityClass), self._keys.endings]
        self._last_read = dict.fromkeys(streams, b"0")

    def _read_streams(self, block_ms: int) -> None:
        reply = self._client.xread(self._last_read, count=READ_COUNT, block=block_ms)
        for name, entries in cast(QueueReply, reply or []):
            self._last_read[name.decode()] = entries[-1][0]
            if name.decode() == self._keys.endings:
                self._set_right(entries)
                continue
            for entry_id, fields in entries:
                self._note(name, entry_id, fields)

    def _set_right(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Charge ended requests what they used, in place of what was expected."""
        times = {}
        for _, fields in entries:
            try:
                ending = read_ending(fields)
            except UnreadableMessage as error:
                log.error("dead letter in %s: %s", self._keys.endings, error)
                continue
            charge, used = ending.charge, ending.usage
            service = RATES.charge(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
            self._virtual_time.charge(charge.tenant_id, service - charge.service, charge.weight)
            self._waiting.recharged(charge.tenant_id)
            times[charge.tenant_id] = self._virtual_time.of(charge.tenant_id)
            self._release(charge.tenant_id, ending.request_id, used)
        entry_ids = [entry_id.decode() for entry_id, _ in entries]
        invoke(self._client, set_clock(self._keys, self._token, times, entry_ids))

    def _release(self, tenant_id: str, request_id: str, used: Usage) -> None:
        """Give a tenant back what its request reserved and did not use, and its place."""
        num_used = used.prompt_tokens + used.completion_tokens
        invoke(self._client, release(tenant_id, request_id, num_used))

    def _note(self, queue: bytes, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        request_id = fields.get(b"id", b"").decode(errors="replace")
        error = fields.get(b"cancelled", b"").decode()
        if error:
            self._waiting.discard(request_id)
            # The entry is the cancellation: its id says when that was asked.
            asked_at = int(entry_id.partition(b"-")[0]) / 1000
            cancel = CancelProof(asked_at, max(0.0, self._clock.now() - asked_at))
            end_request(self._client, self._database, self._keys, request_id, error, cancel)
            self._client.xdel(queue, entry_id)
            return
        try:
            tag = fields.get(b"tag")
            entry = unpack_entry(fields.get(b"header", b""))
            self._waiting.add(entry, float(tag) if tag else None)
        except UnreadableMessage as error:
            log.error("dead letter in %s: %s", queue.decode(), error)
            self._client.xdel(queue, entry_id)

    def _expire(self) -> None:
        for entry in self._waiting.expired(self._clock.now()):
            self._end(entry, "deadline_exceeded")

    def _end(self, entry: QueueEntry, error: str) -> None:
        self._waiting.discard(entry.request_id)
        end_request(self._client, self._database, self._keys, entry.request_id, error)
        self._release(entry.tenant_id, entry.request_id, Usage(0, 0))

    def _place_all(self) -> None:
        """Place from the head on until one does not fit, even by the newest snapshots."""
        while (entry := self._waiting.head(self._clock.now())) is not None:
            is_fresh = self._refresh_snapshots(SNAPSHOT_LIFE_S)
            placement = self._place(entry)
            if placement is None and not is_fresh:
                self._refresh_snapshots(0.0)
                placement = self._place(entry)
            if placement is None and is_hopeless(entry, self._snapshots.values()):
                log.error("request %s fits the KV pool of no replica", entry.request_id)
                self._end(entry, "internal_error")
            elif placement is None or not self._assign(entry, placement):
                return

    def _place(self, entry: QueueEntry) -> Placement | None:
        return place(entry, self._snapshots.values(), self._load_since())

    def _refresh_snapshots(self, life_s: float) -> bool:
        """Read the snapshots unless those at hand are younger than `life_s`. True if it did.

        An older snapshot is never wrong about room: what was assigned since is subtracted.
        """
        now = time.monotonic()
        if now - self._snapshots_at < life_s:
            return False
        self._snapshots, _ = read_snapshots(self._client, self._keys)
        self._snapshots_at = now
        return True

    def _assign(self, entry: QueueEntry, placement: Placement) -> bool:
        """Give the head of the queue away. False if nothing more can be placed now."""
        service = expected_service(entry, self._snapshots[placement.replica_id], RATES)
        charge = self._waiting.charge_for(entry.request_id, service)
        call = assign(self._keys, self._token, entry, placement.replica_id, charge)
        fault_point("dispatch.before_assign")
        reply = invoke(self._client, call)
        if reply[0] == b"not_leader":
            self._is_leading = False
            return False
        if reply[0] == b"full":
            return False
        if reply[0] != b"assigned":
            self._waiting.discard(entry.request_id)
        else:
            fault_point("dispatch.after_assign")
            self._waiting.take(entry.request_id, charge)
            orders = self._orders.setdefault(placement.replica_id, [])
            orders.append((_order(reply[2].decode()), entry))
        return True

    def _load_since(self) -> dict[str, Load]:
        """What each replica was given after the snapshot that it last sent."""
        loads = {}
        for replica_id, snapshot in self._snapshots.items():
            counted = _order(snapshot.last_order)
            orders = [o for o in self._orders.get(replica_id, []) if o[0] > counted]
            self._orders[replica_id] = orders
            loads[replica_id] = load_of([entry for _, entry in orders], snapshot)
        return loads


def _order(entry_id: str) -> tuple[int, int]:
    """A stream id as numbers, which sort in time."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def main() -> None:
    """Dispatch every registered model until SIGTERM."""
    start_logging()
    stop = stop_event()
    with refusing_to_start("dispatcher"):
        settings = read_settings(DispatcherSettings)
        arm(settings.headrace_fault, is_test_build=settings.headrace_test_build)
        check_redis(settings.redis_url)
    client = connect(settings.redis_url)
    database = connect_database(settings.database_url, "dispatcher")
    threads: dict[str, threading.Thread] = {}
    while not stop.is_set():
        for model in _registered_models(database):
            if model not in threads:
                clock = SharedClock()
                clock.synchronize(client)
                dispatcher = Dispatcher(client, database, model, clock)
                threads[model] = threading.Thread(
                    target=dispatcher.run, args=(stop,), name=f"dispatcher {model}", daemon=True
                )
                threads[model].start()
        if not all(thread.is_alive() for thread in threads.values()):
            raise SystemExit("A dispatching thread died; see the log above.")
        stop.wait(REGISTRY_POLL_S)
    for thread in threads.values():
        thread.join()


def _registered_models(database: Engine) -> tuple[str, ...]:
    try:
        with database.connect() as connection:
            return load_registry(connection).models
    except SQLAlchemyError:
        return ()
