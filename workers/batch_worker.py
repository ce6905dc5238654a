"""The batch worker: a Celery worker that carries batches, on a node that may vanish.

SIGTERM is a soft stop. The processes that carry batches hear of it through a pipe, give their
leases back and ring for the next worker; the requests they followed go on without them.
"""

import logging
import sys

from celery import signals
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from control.batches.doorbell import Doorbell, ring_due_batches
from control.database.connection import connect as connect_database
from control.faults import arm
from control.starting import check_redis, read_settings, refusing_to_start
from workers.batch_app import build_app
from workers.batch_drain import DrainPipe
from workers.batch_process import BatchProcess
from workers.batch_settings import BatchWorkerSettings, remap_sigterm
from workers.process import start_logging

log = logging.getLogger(__name__)


def main() -> None:
    """Carry batches until SIGTERM."""
    start_logging()
    remap_sigterm()
    with refusing_to_start("batch worker"):
        settings = read_settings(BatchWorkerSettings)
        arm(settings.headrace_fault, is_test_build=settings.headrace_test_build)
        check_redis(settings.redis_url)
    drain = DrainPipe(settings.headrace_batch_drain_s)
    process = BatchProcess(settings, drain)
    app = build_app(settings, process)

    def keep_our_logging(**_: object) -> None:
        """Celery leaves logging alone once somebody answers this signal."""

    def enter_child(**_: object) -> None:
        drain.enter_child()

    def leave_child(**_: object) -> None:
        process.close()

    signals.setup_logging.connect(keep_our_logging, weak=False)
    signals.worker_process_init.connect(enter_child, weak=False)
    signals.worker_process_shutdown.connect(leave_child, weak=False)

    class DrainingWorker(app.Worker):  # type: ignore[misc,name-defined]  # Celery has no types
        """Tells the children before Celery begins to wait for them."""

        def wait_for_soft_shutdown(self) -> None:
            drain.announce()
            super().wait_for_soft_shutdown()

    _take_up_orphans(settings)
    # Gossip and mingle are workers talking to workers; ours share nothing but the rows.
    worker = DrainingWorker(pool="prefork", without_gossip=True, without_mingle=True)
    worker.start()
    if worker.exitcode and not drain.is_announced:
        sys.exit(worker.exitcode)


def _take_up_orphans(settings: BatchWorkerSettings) -> None:
    """Ring for what an earlier worker left behind, rather than wait for maintenance to."""
    database = connect_database(settings.database_url, "batch-worker", pool_size=1)
    doorbell = Doorbell(settings.celery_broker_url)
    try:
        with database.begin() as connection:
            num_rung = ring_due_batches(connection, doorbell, even_leased=True)
        log.info("%d open batches are rung for", num_rung)
    except (SQLAlchemyError, RedisError, OSError) as error:
        log.warning("open batches wait for maintenance: %s", type(error).__name__)
    finally:
        doorbell.close()
        database.dispose()
