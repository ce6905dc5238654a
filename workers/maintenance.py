"""Periodic care: partitions ahead of time, lost reservations expired, idempotency keys of
yesterday forgotten, batch doorbells re-rung.

Any number may run; the one that holds the advisory lock works, the others wait. Each round
stands alone, so a round that fails is simply tried again.
"""

import logging
from collections.abc import Callable

from redis.exceptions import RedisError
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from control.admission.idempotency import prune_keys
from control.batches.doorbell import Doorbell, ring_due_batches
from control.database.connection import connect as connect_database
from control.faults import arm
from control.metering.dead_replicas import book_the_dead
from control.metering.expiry import LEAST_AGE_S, Expiry
from control.metering.ledger import read_violations
from control.metering.step_log import STEP_LOG_FOLDER, remove_old
from control.metering.unsettled import settle_late
from control.starting import check_redis, read_settings, refusing_to_start
from control.streams.connection import connect
from workers.process import start_logging, stop_event
from workers.settings import MaintenanceSettings

ROUND_S = 5.0
NUM_MONTHS_AHEAD = 2
STEP_LOG_AGE_S = 7 * 86_400.0
RECENT_S = 3_600.0
MAINTENANCE_LOCK = 0x6D61696E74  # "maint" in ASCII

log = logging.getLogger(__name__)


def main() -> None:
    """Work in rounds until SIGTERM."""
    start_logging()
    stop = stop_event()
    with refusing_to_start("maintenance process"):
        settings = read_settings(MaintenanceSettings)
        arm(settings.headrace_fault, is_test_build=settings.headrace_test_build)
        check_redis(settings.redis_url)
    client = connect(settings.redis_url)
    database = connect_database(settings.database_url, "maintenance", pool_size=3)
    doorbell = Doorbell(settings.celery_broker_url)
    patience_s = settings.headrace_expire_after_s
    expiry = Expiry(patience_s, min(LEAST_AGE_S, patience_s))
    step_logs = settings.headrace_data_dir / STEP_LOG_FOLDER
    duties: dict[str, Callable[[Connection], object]] = {
        "partitions": ensure_partitions,
        # What has ended is settled before anything is taken for lost.
        "late settlements": lambda _: settle_late(database, client),
        "waste of the dead": lambda _: book_the_dead(database, step_logs),
        "old step logs": lambda _: remove_old(step_logs, STEP_LOG_AGE_S),
        "broken laws": report_violations,
        "expiry": lambda connection: expiry.expire(connection, client),
        "keys": prune_keys,
        "doorbells": lambda connection: ring_due_batches(connection, doorbell),
    }
    while not stop.is_set():
        try:
            with database.connect() as holder:
                if _holds_lock(holder):
                    for name, duty in duties.items():
                        with database.begin() as connection:
                            log.debug("%s: %s", name, duty(connection))
        except (SQLAlchemyError, RedisError, OSError) as error:
            log.warning("round cut short: %s", type(error).__name__)
        stop.wait(ROUND_S)


def report_violations(connection: Connection) -> int:
    """Look for rows of the last hour that break a law of the ledger. Returns how many."""
    violations = read_violations(connection, since_s=RECENT_S)
    for violation in violations:
        log.error(
            "LEDGER: %s: request %s: %s", violation.law, violation.request_id, violation.detail
        )
    return len(violations)


def ensure_partitions(connection: Connection) -> None:
    """Make this month's partitions and the next ones."""
    connection.execute(
        text("SELECT ensure_partitions(CAST(now() AS date), :ahead)"), {"ahead": NUM_MONTHS_AHEAD}
    )


def _holds_lock(connection: Connection) -> bool:
    """Take the lock for this session; it is given back when the connection goes to the pool."""
    taken = connection.execute(
        text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": MAINTENANCE_LOCK}
    ).scalar_one()
    return bool(taken)
