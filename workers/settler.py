"""Settles ended requests: tokens first, money second, ending last.

The tokens of a request are in its log before it comes here. One thread commits settlements in
groups, so that many endings cost one commit, and only then publishes each request's last delta:
a client that saw the end can always find its bill. While PostgreSQL is away endings wait.
"""

import logging
import queue
import threading

import redis
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from control.faults import fault_point
from control.metering.settlement import Settlement, read_ending, settle
from control.streams.functions import Publication, invoke, step
from control.streams.keys import ModelKeys
from workers.delivery import Delivery
from workers.retrying import retry_until_done

MAX_GROUP = 64
MAX_WAITING = 4096

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
        while is_open:
            group = self._next_group()
            is_open = None not in group
            deliveries = [delivery for delivery in group if delivery is not None]
            if deliveries:
                publications = self._persist(deliveries)
                self._publish(publications)

    def _next_group(self) -> list[Delivery | None]:
        group = [self._ended.get()]
        while len(group) < MAX_GROUP and group[-1] is not None:
            try:
                group.append(self._ended.get_nowait())
            except queue.Empty:
                break
        return group

    def _persist(self, deliveries: list[Delivery]) -> list[Publication]:
        """Commit the settlements, however long PostgreSQL takes to be back."""
        settlements = {d.request.request_id: d.settlement(self._replica_id) for d in deliveries}
        endings = retry_until_done(
            lambda: self._commit(list(settlements.values())), SQLAlchemyError
        )
        publications = []
        for delivery in deliveries:
            ending = endings.get(delivery.request.request_id)
            if ending is not None:
                publications.append(delivery.last_delta(ending.usage, ending.error))
        return publications

    def _commit(self, settlements: list[Settlement]) -> dict[str, Settlement]:
        try:
            return self._settle(settlements)
        except (DataError, IntegrityError):
            if len(settlements) > 1:
                # One bad row must not hold up the others.
                return {k: v for s in settlements for k, v in self._commit([s]).items()}
            log.exception("request %s cannot be settled", settlements[0].request_id)
            return {}

    def _settle(self, settlements: list[Settlement]) -> dict[str, Settlement]:
        with self._database.begin() as connection:
            closed = settle(connection, settlements)
            fault_point("settle.before_commit")
            endings = {s.request_id: s for s in settlements if s.request_id in closed}
            for settlement in settlements:
                if settlement.request_id in closed:
                    continue
                stored = read_ending(connection, settlement.request_id)
                if stored is not None:
                    endings[settlement.request_id] = Settlement(
                        settlement.request_id,
                        settlement.attempt,
                        stored.usage,
                        error=stored.error,
                    )
        fault_point("settle.after_commit")
        return endings

    def _publish(self, publications: list[Publication]) -> None:
        if publications:
            retry_until_done(
                lambda: invoke(self._client, step(self._keys, publications)), RedisError
            )
            fault_point("settle.after_ending")
