"""Settles ended requests: tokens first, money second, ending last.

The tokens of a request are in its log before it comes here. One thread commits settlements in
groups, so that many endings cost one commit, and only then publishes each request's last delta:
a client that saw the end can always find its bill. When PostgreSQL has been away for 2 s endings
are published all the same, marked, and their settlements wait in Redis for maintenance. What even
Redis has lost stays here until the ledger has it.
"""

import contextlib
import logging
import queue
import threading
from dataclasses import replace

import redis
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from control.faults import fault_point
from control.metering.settlement import (
    Settlement,
    StoredEnding,
    WasteReason,
    book_waste,
    read_ending,
    settle,
    waste_of,
)
from control.metering.unsettled import pack_settlement
from control.streams.functions import Publication, end_unsettled, invoke, step
from control.streams.keys import ModelKeys
from workers.delivery import Delivery
from workers.retrying import retry_until_done

MAX_GROUP = 64
MAX_WAITING = 4096
PATIENCE_S = 2.0

log = logging.getLogger(__name__)


class Settler:
    """Owns the settling thread; `put` deliveries that are over, `close` to finish the rest."""

    def __init__(
        self, client: redis.Redis, database: Engine, keys: ModelKeys, replica_id: str
    ) -> None:
        self._client = client
        self._database = database
        self._keys = keys
        self._replica_id = replica_id
        self._ended: queue.Queue[Delivery | None] = queue.Queue(MAX_WAITING)
        self._unsettled: list[Delivery] = []
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)

    def start(self) -> None:
        """Begin settling."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def put(self, delivery: Delivery) -> None:
        """Settle and end this request. Blocks while far too many wait."""
        assert delivery.is_over
        self._ended.put(delivery)

    def close(self, timeout_s: float) -> bool:
        """Settle what was put and stop. False if that took longer than `timeout_s`."""
        self._ended.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_open = True
        while is_open or self._unsettled:
            group = self._next_group() if is_open else []
            is_open = is_open and None not in group
            deliveries = [delivery for delivery in group if delivery is not None]
            deliveries, self._unsettled = self._unsettled + deliveries, []
            if deliveries:
                self._end(deliveries)

    def _next_group(self) -> list[Delivery | None]:
        group: list[Delivery | None] = []
        # What nobody else has is tried again, whether or not there is more.
        timeout_s = PATIENCE_S if self._unsettled else None
        with contextlib.suppress(queue.Empty):
            group.append(self._ended.get(timeout=timeout_s))
            while len(group) < MAX_GROUP and group[-1] is not None:
                group.append(self._ended.get_nowait())
        return group

    def _end(self, deliveries: list[Delivery]) -> None:
        """Settle, then say the endings; while PostgreSQL is away, the other way round."""
        settlements = [delivery.settlement(self._replica_id) for delivery in deliveries]
        pairs = list(zip(deliveries, settlements, strict=True))
        abandoned = [settlement for delivery, settlement in pairs if delivery.is_abandoned]
        to_settle = [settlement for delivery, settlement in pairs if not delivery.is_abandoned]
        try:
            endings = retry_until_done(
                lambda: self._commit(to_settle, abandoned), SQLAlchemyError, patience_s=PATIENCE_S
            )
        except SQLAlchemyError:
            log.warning("the ledger is away: %d requests end unsettled", len(to_settle))
            for delivery, settlement in pairs:
                self._end_unsettled(delivery, settlement)
            return
        self._publish(
            [
                delivery.last_delta(ending.usage, ending.error)
                for delivery in deliveries
                if (ending := endings.get(delivery.request.request_id)) is not None
            ]
        )

    def _end_unsettled(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a request whose settlement waits in Redis, or keep it if Redis has lost it."""
        if delivery.is_abandoned:
            self._unsettled.append(delivery)
            return
        last = delivery.last_delta(settlement.usage, settlement.error, is_settled=False)
        call = end_unsettled(self._keys, last, pack_settlement(settlement))
        reply = retry_until_done(lambda: invoke(self._client, call), RedisError)
        if reply not in (b"ok", b"cancelled"):
            self._unsettled.append(delivery)

    def _commit(
        self, settlements: list[Settlement], abandoned: list[Settlement]
    ) -> dict[str, StoredEnding]:
        """Settle all in one transaction. Returns how those ended that have an ending now."""
        try:
            return self._settle(settlements, abandoned)
        except (DataError, IntegrityError):
            if len(settlements) + len(abandoned) > 1:
                # One bad row must not hold up the others.
                endings: dict[str, StoredEnding] = {}
                for settlement in settlements:
                    endings |= self._commit([settlement], [])
                for settlement in abandoned:
                    self._commit([], [settlement])
                return endings
            log.exception("request %s cannot be settled", [*settlements, *abandoned])
            return {}

    def _settle(
        self, settlements: list[Settlement], abandoned: list[Settlement]
    ) -> dict[str, StoredEnding]:
        with self._database.begin() as connection:
            closed = settle(connection, settlements) if settlements else frozenset()
            endings = {
                s.request_id: StoredEnding(s.usage, s.error)
                for s in settlements
                if s.request_id in closed
            }
            waste = [w for s in abandoned for w in waste_of(s)]
            fault_point("settle.before_commit")
            for settlement in settlements:
                if settlement.request_id in closed:
                    continue
                stored = read_ending(connection, settlement.request_id)
                if stored is not None:
                    endings[settlement.request_id] = stored
                waste += waste_of(_with_unbilled(settlement, stored))
            if waste:
                book_waste(connection, waste)
        fault_point("settle.after_commit")
        return endings

    def _publish(self, publications: list[Publication]) -> None:
        if publications:
            retry_until_done(
                lambda: invoke(self._client, step(self._keys, publications)), RedisError
            )
            fault_point("settle.after_ending")


def _with_unbilled(settlement: Settlement, stored: StoredEnding | None) -> Settlement:
    """Somebody else ended the request: what of ours the ledger does not bill is waste."""
    billed = 0 if stored is None else stored.usage.completion_tokens
    unbilled = max(0, settlement.usage.completion_tokens - billed)
    lost = settlement.waste.get(WasteReason.REQUEST_LOST, 0) + unbilled
    return replace(settlement, waste={**settlement.waste, WasteReason.REQUEST_LOST: lost})
