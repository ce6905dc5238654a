"""The doorbell: a Celery message that says "look at this batch", and no more.

The row is the truth. A doorbell may be lost, doubled or late without harm: a lost one is rung
again by `ring_due_batches`, a second one finds nothing to do. So ringing never fails a caller.
"""

import logging

from celery import Celery
from kombu.exceptions import KombuError
from sqlalchemy import Connection, text

TASK = "headrace.carry_batch"
QUEUE = "headrace-batches"
MAX_WAITING = 1000
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


def is_redis(broker_url: str) -> bool:
    """True for a broker on Redis or Valkey, however it is reached."""
    return broker_url.startswith(("redis", "rediss", "valkey", "sentinel"))


class Doorbell:
    """Rings for batch workers through the broker. Its calls block, for a few seconds at most."""

    def __init__(self, broker_url: str) -> None:
        self._app = Celery("headrace-doorbell", broker=broker_url, set_as_current=False)
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            task_default_queue=QUEUE,
            task_ignore_result=True,
            # A broker that is away must not hold up whoever rings: the row is committed.
            broker_connection_timeout=CONNECT_TIMEOUT_S,
            broker_connection_retry=False,
            task_publish_retry=False,
        )
        if is_redis(broker_url):
            self._app.conf.broker_transport_options = {
                "socket_timeout": REPLY_TIMEOUT_S,
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "max_retries": 0,
            }

        transport = self._app.connection_for_write()
        self._away = (
            KombuError,
            OSError,
            *transport.connection_errors,
            *transport.channel_errors,
        )

    def ring(self, batch_id: str) -> bool:
        """Send the batch's doorbell. False, and a line in the log, if the broker is away."""
        try:
            self._app.send_task(TASK, args=(batch_id,), ignore_result=True)
        except self._away as error:
            log.warning("no doorbell for %s now: %s", batch_id, type(error).__name__)
            return False
        return True

    def num_waiting(self) -> int | None:
        """Doorbells that no worker has taken yet, or None if the broker is away."""
        try:
            with self._app.connection_for_write() as connection:
                queue = self._app.amqp.queues[QUEUE](connection.default_channel)
                # Not passive: a queue that is empty does not exist in Redis.
                return int(queue.queue_declare().message_count)
        except self._away as error:
            log.warning("the broker is away: %s", type(error).__name__)
            return None

    def close(self) -> None:
        """Give the connections back."""
        self._app.close()


def ring_due_batches(
    connection: Connection, doorbell: Doorbell, *, even_leased: bool = False
) -> int:
    """Ring for every open batch that nobody seems to carry, oldest first. Returns how many.

    The batches of a suspended tenant wait until it is resumed, or until their window is over.

    To be called every minute or more often. A worker that starts rings `even_leased`, for the
    leases may be those of the dead. Rings for nobody when so many doorbells wait that no worker
    can be there.
    """
    num_waiting = doorbell.num_waiting()
    if num_waiting is None or num_waiting >= MAX_WAITING:
        return 0
    rows = connection.execute(
        text(
            """
            SELECT batch_id FROM batches b
            WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
              AND NOT (status IN ('validating', 'in_progress') AND expires_at > now()
                  AND EXISTS (
                      SELECT 1 FROM tenants t
                      WHERE t.tenant_id = b.tenant_id AND t.suspended_at IS NOT NULL))
              AND (:even_leased OR NOT EXISTS (
                  SELECT 1 FROM batch_items i
                  WHERE i.batch_id = b.batch_id AND i.state = 'running'
                    AND i.leased_until > now()))
            ORDER BY b.created_at LIMIT :limit
            """
        ),
        {"limit": MAX_WAITING - num_waiting, "even_leased": even_leased},
    ).all()
    return sum(doorbell.ring(row.batch_id) for row in rows)
