"""A replica: one engine, the threads around it, and the order in which they start and stop.

    inbox thread ──▶ engine thread ──▶ publisher thread ──▶ settler thread
    (orders)         (computes)        (text, log, feed)    (ledger, endings)

The heartbeat runs on the main thread. A replica whose threads do not all live ends at once: its
requests are then placed elsewhere and go on from their logs.
"""

import logging
import secrets
import threading
from dataclasses import replace
from functools import partial

import redis
import torch
from redis.exceptions import RedisError
from sqlalchemy import Engine as Database

from control.database.connection import connect as connect_database
from control.faults import arm
from control.metering.step_log import STEP_LOG_FOLDER, StepLog
from control.registry.model_version import ModelVersion
from control.registry.store import load_registry
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import report, retire
from control.starting import check_redis, read_settings, refusing_to_start
from control.streams.clock import SharedClock
from control.streams.connection import connect
from control.streams.functions import invoke, requeue
from control.streams.keys import ModelKeys
from engine import garbage
from engine.engine import Engine
from engine.interface.generation_request import PriorityClass
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer
from workers.delivery_table import DeliveryTable, kv_tokens_free
from workers.inbox import Inbox
from workers.process import start_logging, stop_event
from workers.publisher import Publisher
from workers.replica_engine import load_engine, warm_up
from workers.replica_identity import ReplicaIdentity
from workers.retrying import retry_until_done
from workers.settings import ReplicaSettings
from workers.settler import Settler
from workers.stall_watch import StallWatch

HEARTBEAT_S = 0.25
LEAST_HEARTBEAT_S = 0.02
STOP_LIMIT_S = 10.0
# Of requests of nobody that the engine knows.
NO_SCOPE = ""
SETTLE_LIMIT_S = 30.0

log = logging.getLogger(__name__)


class Replica:
    """Everything around one engine."""

    def __init__(
        self,
        client: redis.Redis,
        database: Database,
        identity: ReplicaIdentity,
        engine: tuple[Engine, Tokenizer],
        clock: SharedClock,
        steps: StepLog,
    ) -> None:
        self._client = client
        self._clock = clock
        self._identity = identity
        self._keys = ModelKeys(identity.model)
        self._loop = EngineLoop(engine[0])
        self._settings = engine[0].settings
        self._num_slots = self._settings.num_blocks * self._settings.block_size
        self._table = DeliveryTable(self._settings.block_size, self._loop.expected_tokens)
        self._stall_watch = StallWatch(self._loop.verdict)
        self._settler = Settler(client, database, self._keys, identity.replica_id)
        self._publisher = Publisher(
            client, self._keys, (self._loop, self._table, self._settler), steps
        )
        self.steps = steps
        self._inbox = Inbox(
            client, database, identity, (self._loop, engine[1]), (self._table, clock)
        )
        self._is_accepting = True

    def run(self, stop: threading.Event, drain_s: float) -> None:
        """Serve until told to stop, then drain. Raises RuntimeError if a part of it died."""
        for part in (self._loop, self._publisher, self._settler, self._inbox):
            part.start()
        log.info("replica %s serves %s", self._identity.replica_id, self._identity.model)
        while not stop.is_set():
            self._stall_watch.look()
            self._beat()
            self._check_parts()
            self._publisher.freed.wait(HEARTBEAT_S)
            self._publisher.freed.clear()
            stop.wait(LEAST_HEARTBEAT_S)
        self._drain(drain_s)

    def snapshot(self) -> ReplicaSnapshot:
        """What this replica is now."""
        stats = self._loop.stats()
        load = self._table.load(stats.running)
        free = kv_tokens_free(self._num_slots, load, stats.projected_free_tokens)
        # The same if all made way for interactive requests that does.
        num_fixed = stats.running - stats.running_interactive - stats.running_yielding
        fixed = self._table.load(stats.running_interactive, PriorityClass.INTERACTIVE)
        fixed = replace(fixed, num_sequences=fixed.num_sequences + num_fixed)
        projected_free = stats.projected_free_tokens + stats.yielding_tokens
        free_if_yielded = kv_tokens_free(self._num_slots, fixed, projected_free)
        is_stalled = self._stall_watch.is_stalled
        return ReplicaSnapshot(
            replica_id=self._identity.replica_id,
            model=self._identity.model,
            version=self._identity.version,
            weights_digest=self._identity.weights_digest,
            is_accepting=self._is_accepting and not is_stalled,
            kv_tokens_total=self._num_slots,
            kv_tokens_free=free,
            kv_blocks_total=stats.kv_blocks_total,
            kv_blocks_free=stats.kv_blocks_free,
            num_sequences_max=self._settings.max_num_seqs,
            num_running=load.num_sequences - min(stats.waiting, load.num_sequences),
            num_waiting=min(stats.waiting, load.num_sequences),
            steps_total=stats.steps_total,
            tokens_total=self._publisher.tokens_total,
            last_order=load.last_order,
            is_stalled=is_stalled,
            stalls_total=stats.stalls_total + is_stalled,
            preemptions_total=stats.preemptions_total,
            cached_tokens_total=stats.cached_tokens_total,
            inter_token_target_ms=1000 * stats.controller.target_s,
            inter_token_ms=1000 * stats.controller.measured_s,
            prefill_tokens=stats.controller.prefill_tokens,
            expected_output=self._loop.expected_output(NO_SCOPE),
            expected_outputs={
                scope: self._loop.expected_output(scope) for scope in self._table.recent_scopes()
            },
            kv_tokens_yielding=max(0, free_if_yielded - free),
            num_sequences_yielding=max(0, load.num_sequences - fixed.num_sequences),
        )

    def _beat(self) -> None:
        try:
            report(self._client, self.snapshot())
        except RedisError as error:
            log.warning("no heartbeat: %s", type(error).__name__)

    def _check_parts(self) -> None:
        for part in (self._loop, self._publisher, self._settler, self._inbox):
            if not part.is_alive:
                reason = self._loop.failure
                raise RuntimeError(f"The {type(part).__name__} thread died") from reason

    def _drain(self, drain_s: float) -> None:
        """Let what runs finish for a while, then hand the rest back with its tokens."""
        self._is_accepting = False
        self._beat()
        self._inbox.close()
        self._table.wait_until_empty(drain_s)
        self._loop.stop(STOP_LIMIT_S)
        self._publisher.join(STOP_LIMIT_S)
        for delivery in self._table.all():
            call = requeue(
                self._keys, "", delivery.request.request_id, self._identity.replica_id, 0
            )
            retry_until_done(partial(invoke, self._client, call), RedisError)
        self._settler.close(SETTLE_LIMIT_S)
        self.steps.close()
        retire(self._client, self._keys, self._identity.replica_id)
        log.info("replica %s has left", self._identity.replica_id)


def main() -> None:
    """Serve the model of the settings until SIGTERM."""
    start_logging()
    stop = stop_event()
    with refusing_to_start("replica"):
        settings = read_settings(ReplicaSettings)
        arm(settings.headrace_fault, is_test_build=settings.headrace_test_build)
        check_redis(settings.redis_url)
        database = connect_database(settings.database_url, "replica")
        version = _version_to_serve(database, settings.headrace_model)
    if settings.headrace_num_threads:
        torch.set_num_threads(settings.headrace_num_threads)
    client = connect(settings.redis_url)
    clock = SharedClock()
    clock.synchronize(client)
    engine, tokenizer = load_engine(version, settings, clock)
    warm_up(engine)
    garbage.settle()
    identity = ReplicaIdentity(
        replica_id=f"{version.model}-{secrets.token_hex(6)}",
        model=version.model,
        version=version.version,
        weights_digest=version.weights_digest,
    )
    steps = StepLog(
        settings.headrace_data_dir / STEP_LOG_FOLDER, identity.replica_id, identity.model
    )
    Replica(client, database, identity, (engine, tokenizer), clock, steps).run(
        stop, settings.headrace_drain_s
    )


def _version_to_serve(database: Database, name: str) -> ModelVersion:
    with database.connect() as connection:
        version = load_registry(connection).resolve(name)
    if version is None:
        raise SystemExit(f"HEADRACE_MODEL names {name!r}, which is not registered.")
    return version
