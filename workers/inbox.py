"""Takes a replica's orders: run this attempt, stop that request.

An order is deleted once it is in the delivery table or refused, so a full inbox means a slow
replica, and the dispatcher holds further requests back. A request that runs its second attempt
or later is first fenced in PostgreSQL, and starts from what its log says was delivered.
"""

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import cast

import redis
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from control.faults import fault_point
from control.metering.settlement import (
    FIRST_ATTEMPT,
    Claim,
    StoredEnding,
    begin_attempt,
    read_ending,
)
from control.streams.clock import SharedClock
from control.streams.frames import pack_frames, unpack_frames
from control.streams.functions import Publication, invoke, requeue, step
from control.streams.keys import ModelKeys
from control.streams.messages import (
    Assignment,
    Cancel,
    UnreadableMessage,
    read_inbox_message,
)
from engine.interface.generation_delta import GenerationDelta, Usage
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer
from workers.delivery import Delivery
from workers.delivery_table import DeliveryTable
from workers.replica_identity import ReplicaIdentity
from workers.request_times import Received
from workers.retrying import retry_until_done

READ_BLOCK_MS = 500
READ_COUNT = 64
RETRY_S = 0.1
MAX_DEAD_LETTERS = 1000

# Of a request that no row knows: it was never reserved, so nothing is charged for it.
UNKNOWN_ENDING = StoredEnding(Usage(0, 0), "request_lost")

Field = bytes | bytearray | memoryview | str | int | float
InboxEntries = list[tuple[bytes, dict[bytes, bytes]]]
InboxReply = list[tuple[bytes, InboxEntries]]

log = logging.getLogger(__name__)


class Inbox:
    """Owns the thread that reads a replica's inbox."""

    def __init__(
        self,
        client: redis.Redis,
        database: Engine,
        identity: ReplicaIdentity,
        engine: tuple[EngineLoop, Tokenizer],
        bookkeeping: tuple[DeliveryTable, SharedClock],
    ) -> None:
        self._client = client
        self._database = database
        self._identity = identity
        self._keys = ModelKeys(identity.model)
        self._loop, self._tokenizer = engine
        self._table, self._clock = bookkeeping
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to take orders."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take no more orders, and hand back those that nobody has taken."""
        self._is_closed.set()
        self._thread.join(READ_BLOCK_MS / 1000 + 5)
        name = self._keys.inbox(self._identity.replica_id)
        left = retry_until_done(partial(self._client.xrange, name), RedisError)
        for _, fields in cast(InboxEntries, left):
            with suppress(UnreadableMessage):
                message = read_inbox_message(fields)
                if isinstance(message, Assignment):
                    self._hand_back(message, failures=0)

    def _run(self) -> None:
        inbox, last = self._keys.inbox(self._identity.replica_id), b"0"
        while not self._is_closed.is_set():
            try:
                reply = self._client.xread({inbox: last}, count=READ_COUNT, block=READ_BLOCK_MS)
            except RedisError:
                self._is_closed.wait(RETRY_S)
                continue
            for _, entries in cast(InboxReply, reply or []):
                for entry_id, fields in entries:
                    self._take(fields, entry_id)
                    last = entry_id
                    self._table.note_order(entry_id.decode())
                done = [entry_id for entry_id, _ in entries]
                retry_until_done(partial(self._client.xdel, inbox, *done), RedisError)

    def _take(self, fields: dict[bytes, bytes], entry_id: bytes) -> None:
        try:
            message = read_inbox_message(fields, entry_id)
        except UnreadableMessage as error:
            log.error("dead letter: %s", error)
            self._bury(fields)
            return
        match message:
            case Cancel(request_id, code, asked_at):
                delivery = self._table.get(request_id)
                if delivery is not None:
                    delivery.note_cancel(code)
                    num_steps = self._loop.stats().steps_total
                    delivery.times.note_cancel(asked_at, time.monotonic(), num_steps)
                    self._cancel(request_id)
            case Assignment():
                self._begin(message)

    def _begin(self, assignment: Assignment) -> None:
        fault_point("inbox.before_begin")
        if assignment.weights_digest != self._identity.weights_digest:
            log.error("request %s is for other weights", assignment.request_id)
            self._hand_back(assignment, failures=1)
            return
        delivered: list[GenerationDelta] = []
        if assignment.attempt > FIRST_ATTEMPT:
            delivered = self._read_log(assignment.request_id)
            claim, ending = retry_until_done(lambda: self._fence(assignment), SQLAlchemyError)
            if claim is Claim.OVERTAKEN:
                # Redis has lost moves that PostgreSQL has seen. Each move raises the attempt.
                self._hand_back(assignment, failures=0)
            elif claim is not Claim.OURS:
                self._publish_ending(assignment, delivered, ending or UNKNOWN_ENDING)
            if claim is not Claim.OURS:
                return
            fault_point("inbox.after_fence")
        delivery = Delivery(
            assignment,
            self._tokenizer,
            delivered,
            Received(self._clock.now(), time.monotonic()),
        )
        if not self._table.add(delivery):
            # An earlier attempt is still being wound down here.
            self._cancel(assignment.request_id)
            self._hand_back(assignment, failures=0)
            return
        if not self._loop.try_submit(delivery.resumed_request()):
            self._table.remove(assignment.request_id)
            self._hand_back(assignment, failures=0)
            return
        for choice in delivery.finished_choices:
            self._cancel(assignment.request_id, choice)

    def _fence(self, assignment: Assignment) -> tuple[Claim, StoredEnding | None]:
        """Claim the attempt. Returns what was found, and the stored ending if there is one."""
        with self._database.begin() as connection:
            claim = begin_attempt(connection, assignment.request_id, assignment.attempt)
            if claim is Claim.OURS:
                return claim, None
            return claim, read_ending(connection, assignment.request_id)

    def _publish_ending(
        self, assignment: Assignment, delivered: list[GenerationDelta], ending: StoredEnding
    ) -> None:
        last = GenerationDelta(
            request_id=assignment.request_id,
            choice=0,
            serial=len(delivered),
            offset=sum(len(delta.token_ids) for delta in delivered),
            usage=ending.usage,
            error=ending.error,
        )
        log_bytes = len(pack_frames(delivered))
        call = step(self._keys, [Publication.of(assignment.attempt, log_bytes, [last])])
        retry_until_done(lambda: invoke(self._client, call), RedisError)

    def _read_log(self, request_id: str) -> list[GenerationDelta]:
        name = self._keys.log(request_id)
        data = retry_until_done(lambda: self._client.get(name), RedisError)
        return list(unpack_frames(cast(bytes, data or b"")))

    def _hand_back(self, assignment: Assignment, failures: int) -> None:
        replica_id = self._identity.replica_id
        call = requeue(self._keys, "", assignment.request_id, replica_id, failures)
        retry_until_done(lambda: invoke(self._client, call), RedisError)

    def _cancel(self, request_id: str, choice: int | None = None) -> None:
        """Tell the engine; it takes commands between any two steps, so this is short."""
        while not self._loop.try_cancel(request_id, choice):
            if not self._loop.is_alive or self._is_closed.wait(RETRY_S):
                return

    def _bury(self, fields: dict[bytes, bytes]) -> None:
        small = b" ".join(name[:64] + b"=" + value[:256] for name, value in fields.items())
        letter: dict[Field, Field] = {"message": small[:4096]}
        call = partial(self._client.xadd, self._keys.dead, letter, maxlen=MAX_DEAD_LETTERS)
        retry_until_done(call, RedisError)
