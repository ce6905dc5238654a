"""A whole service without HTTP, in this process: dispatcher, replicas, and a follower to ask.

Everything is real but the model, which says its prompt back.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import redis
from sqlalchemy import Engine as Database
from sqlalchemy import text

from control.admission.admission import Admission
from control.admission.reservation import Reservation
from control.database.connection import connect as connect_database
from control.database.connection import connect_async as connect_database_async
from control.identity.request_id import mint_request_id
from control.identity.tenants import create_tenant
from control.metering.step_log import StepLog
from control.registry.manifest import verify_manifest
from control.registry.model_version import ModelVersion
from control.registry.store import register_version
from control.streams.clock import SharedClock
from control.streams.connection import connect, connect_async
from control.streams.follower import Follower
from control.streams.frames import unpack_frames
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from workers.dispatcher import Dispatcher
from workers.replica import Replica
from workers.replica_engine import load_engine
from workers.replica_identity import ReplicaIdentity
from workers.scripted_model import MAX_MODEL_LEN, make_scripted_model
from workers.settings import ReplicaSettings

MAX_QUEUED = 100


@dataclass(slots=True)
class RunningReplica:
    """One replica on a thread."""

    replica: Replica
    stop: threading.Event
    thread: threading.Thread

    def drain(self) -> None:
        """Stop as on SIGTERM and wait."""
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@dataclass(slots=True)
class Answer:
    """All that a request said."""

    deltas: list[GenerationDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of choice 0."""
        return self.of(0)

    def of(self, choice: int) -> tuple[int, ...]:
        """Tokens of one choice."""
        return tuple(t for d in self.deltas if d.choice == choice for t in d.token_ids)

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return "".join(d.text for d in self.deltas if d.choice == 0)

    @property
    def last(self) -> GenerationDelta:
        """The request's ending."""
        return self.deltas[-1]


class Service:
    """The scripted model, or that of a folder with a manifest, under a name of its own."""

    def __init__(
        self, database_url: str, redis_url: str, folder: Path, weights: Path | None = None
    ) -> None:
        self.database_url, self.redis_url = database_url, redis_url
        self.database: Database = connect_database(database_url, "test")
        self.client: redis.Redis = connect(redis_url)
        self.model = f"scripted-{secrets.token_hex(4)}"
        self.keys = ModelKeys(self.model)
        self.clock = SharedClock()
        self.clock.synchronize(self.client)
        self.step_logs = folder.with_name(f"{folder.name}-steps")
        weights = weights or make_scripted_model(folder / "weights")
        self.version = ModelVersion(
            model=self.model,
            version="v1",
            weights_digest=verify_manifest(weights),
            weights_folder=str(weights),
            max_model_len=min(MAX_MODEL_LEN, 512),
            max_output_tokens=256,
            created_at=datetime.now(UTC),
            is_in_force=True,
        )
        # As if a replica had served it lately: requests may wait for the next one.
        self.client.set(self.keys.serving(self.version.weights_digest), b"1")
        with self.database.begin() as connection:
            register_version(connection, self.version)
            self.tenant = create_tenant(connection, self.model)
        self._threads: list[tuple[threading.Event, threading.Thread]] = []
        self._replicas: list[RunningReplica] = []

    def start_dispatcher(self) -> threading.Event:
        """Dispatch on a thread until the returned event is set."""
        stop = threading.Event()
        dispatcher = Dispatcher(self.client, self.database, self.model, self.clock)
        thread = threading.Thread(target=dispatcher.run, args=(stop,), daemon=True)
        thread.start()
        self._threads.append((stop, thread))
        return stop

    def open_requests(self) -> frozenset[str]:
        """Ids of the requests without an ending."""
        members = cast("set[bytes]", self.client.smembers(self.keys.open))
        return frozenset(member.decode() for member in members)

    def num_deltas(self, request_id: str) -> int:
        """How many deltas of a request are in its log."""
        log = cast("bytes | None", self.client.get(self.keys.log(request_id)))
        return sum(1 for _ in unpack_frames(log or b""))

    def close(self) -> None:
        """Stop all that was started."""
        for replica in self._replicas:
            replica.drain()
        for stop, thread in self._threads:
            stop.set()
            thread.join(60)
        self.database.dispose()
        self.client.close()

    def start_replica(self, *, delay_ms: float = 0.0, kv_tokens: int = 2048) -> RunningReplica:
        """Serve on threads; `drain` it in the end."""
        settings = ReplicaSettings(
            database_url=self.database_url,
            redis_url=self.redis_url,
            headrace_model=self.model,
            headrace_data_dir=self.step_logs.parent,
            headrace_kv_tokens=kv_tokens,
            headrace_test_build=True,
            headrace_scripted_delay_ms=delay_ms,
            headrace_max_num_seqs=16,
            headrace_dtype="float32",
        )
        engine = load_engine(self.version, settings, self.clock)
        identity = ReplicaIdentity(
            f"replica-{secrets.token_hex(4)}", self.model, "v1", self.version.weights_digest
        )
        steps = StepLog(self.step_logs, identity.replica_id, self.model)
        replica = Replica(
            connect(self.redis_url), self.database, identity, engine, self.clock, steps
        )
        stop = threading.Event()
        thread = threading.Thread(target=replica.run, args=(stop, 0.2), daemon=True)
        thread.start()
        running = RunningReplica(replica, stop, thread)
        self._replicas.append(running)
        return running

    def request(
        self,
        prompt: bytes,
        *,
        max_tokens: int = 64,
        n: int = 1,
        stop: tuple[str, ...] = (),
        priority_class: PriorityClass = PriorityClass.INTERACTIVE,
        life_s: float = 60.0,
        cache_scope: str = "scope",
    ) -> GenerationRequest:
        """A request whose answer will be its prompt."""
        now = self.clock.now()
        return GenerationRequest(
            request_id=mint_request_id(now, secrets.randbits(98)),
            prompts=(tuple(prompt),),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n, stop=stop),
            priority_class=priority_class,
            cache_scope=cache_scope,
            arrival=now,
            deadline_at=now + life_s,
        )

    def new_tenant(self) -> str:
        """Somebody else; returns the id."""
        with self.database.begin() as connection:
            return create_tenant(connection, f"tenant-{secrets.token_hex(4)}").tenant_id

    def reservation(self, request: GenerationRequest, tenant_id: str | None = None) -> Reservation:
        """The reservation that belongs to a request, of the service's tenant or another."""
        return Reservation(
            request_id=request.request_id,
            tenant_id=tenant_id or self.tenant.tenant_id,
            key_id="key",
            model=self.model,
            version="v1",
            weights_digest=self.version.weights_digest,
            priority_class=request.priority_class,
            endpoint="/v1/completions",
            reserved_tokens=request.max_kv_tokens,
            prompt_tokens=request.num_prompt_tokens,
        )

    @asynccontextmanager
    async def caller(self, tenant_id: str | None = None) -> AsyncIterator["Caller"]:
        """Somebody who can ask and listen, as a gateway does."""
        client = connect_async(self.redis_url)
        database = connect_database_async(self.database_url, "test caller")
        follower = Follower(client, f"caller-{secrets.token_hex(4)}")
        await follower.announce()
        task = asyncio.create_task(follower.run())
        admission = Admission(database, client, follower.follower_id, MAX_QUEUED)
        try:
            yield Caller(self, tenant_id or self.tenant.tenant_id, follower, admission, task)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await client.aclose()
            await database.dispose()

    def usage(self, request_id: str) -> list[tuple[int, int, int, str, str | None]]:
        """(prompt, completion, wasted, outcome, error) of each usage row of the request."""
        with self.database.connect() as connection:
            rows = connection.execute(
                text(
                    "SELECT prompt_tokens, completion_tokens, wasted_tokens, outcome, error_code "
                    "FROM usage_events WHERE request_id = :request_id"
                ),
                {"request_id": request_id},
            )
            return [tuple(row) for row in rows]

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of the request that the ledger says came from the prefix cache."""
        with self.database.connect() as connection:
            cached: int = connection.execute(
                text("SELECT cached_tokens FROM usage_events WHERE request_id = :request_id"),
                {"request_id": request_id},
            ).scalar_one()
            return cached

    def state(self, request_id: str) -> str:
        """The state of a request's row."""
        with self.database.connect() as connection:
            state: str = connection.execute(
                text("SELECT state FROM requests WHERE request_id = :request_id"),
                {"request_id": request_id},
            ).scalar_one()
            return state


@dataclass(slots=True)
class Caller:
    """Asks the service and listens to its answers."""

    service: Service
    tenant_id: str
    follower: Follower
    admission: Admission
    task: "asyncio.Task[None]"

    async def ask(self, request: GenerationRequest, *, most: int | None = None) -> Answer:
        """Everything the request says, or its first `most` deltas."""
        answer = Answer()
        async for delta in self.stream(request):
            answer.deltas.append(delta)
            if most is not None and len(answer.deltas) >= most:
                break
        return answer

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        """The request's deltas as they come."""
        model = self.service.model
        async with self.follower.subscribe(model, request.request_id) as subscription:
            reservation = self.service.reservation(request, self.tenant_id)
            await self.admission.accept(reservation, request)
            while True:
                delta = await subscription.next(30)
                assert delta is not None, "30 s of silence"
                yield delta
                if delta.is_last:
                    return


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds, looking again and again; fail after `seconds`."""
    give_up = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < give_up, f"not within {seconds} s: {holds}"
        pause.wait(0.02)
