"""The Celery side of a batch worker: one queue, one task, and settings with their reasons.

Celery is the doorbell, no more. What it loses is rung again, what it doubles finds nothing to
do, and what it carries is an id.
"""

from celery import Celery

from control.batches.doorbell import QUEUE, TASK, is_redis
from workers.batch_dead_letters import GuardedAMQP
from workers.batch_process import BatchProcess
from workers.batch_settings import BatchWorkerSettings

LONGEST_TASK_S = 120


def build_app(settings: BatchWorkerSettings, process: BatchProcess) -> Celery:
    """The application that a batch worker runs."""
    app = Celery(
        "headrace-batch",
        broker=settings.celery_broker_url,
        amqp=GuardedAMQP,
        set_as_current=False,
    )
    app.conf.update(
        # No message can stop the worker: what is no doorbell is put aside. Named, not imported:
        # SIGTERM must have its meaning before Celery's worker is.
        worker_consumer="workers.batch_consumer:DoorbellConsumer",
        # A message can only ever be data: no pickle, no YAML, no code.
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        # Nobody reads results; the rows are the truth.
        task_ignore_result=True,
        # Acknowledged when it starts. Late acknowledgement kills the worker when the broker
        # restarts under a running task, and the rows do not need the redelivery.
        task_acks_late=False,
        # A worker that is busy leaves the other doorbells to idle ones.
        worker_prefetch_multiplier=1,
        worker_concurrency=settings.headrace_batch_concurrency,
        # A slice ends by itself well before; this is for one that hangs.
        task_time_limit=LONGEST_TASK_S,
        task_default_queue=QUEUE,
        # A broker may be away for as long as it likes; work that runs does not need it.
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # A drain: leases are released in these seconds. What then still runs is cut, and its
        # leases lapse.
        worker_soft_shutdown_timeout=settings.headrace_batch_drain_s,
        # No remote commands and no events: whoever reaches the broker can ring, and only ring.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_redirect_stdouts=False,
    )
    if is_redis(settings.celery_broker_url):
        app.conf.broker_transport_options = {
            # Longer than any task, and swept each second instead of every hundred.
            "visibility_timeout": 2 * LONGEST_TASK_S,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            # A broker that does not answer is a broker that is away.
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
        }

    def carry_batch(batch_id: object) -> None:
        process.carry(batch_id)

    app.task(name=TASK)(carry_batch)
    return app
