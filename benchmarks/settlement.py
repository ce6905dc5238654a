"""What it costs that money comes before the ending.

One by one and in groups: how many settlements a second one settler commits. Then a whole settler,
with 300 requests a second that end at random, on a real PostgreSQL and a real Valkey: how much
later their readers hear the end than if nothing were settled.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import redis
from sqlalchemy import Engine, text

from benchmarks.assigned_requests import assign_requests, stream_request
from benchmarks.postgres_process import running_postgres
from benchmarks.result_file import write_results
from benchmarks.serving import percentile
from benchmarks.valkey_process import running_valkey
from control.database.connection import connect
from control.identity.request_id import created_at_of, mint_request_id
from control.identity.tenants import create_tenant
from control.metering.settlement import Settlement, settle
from control.metering.timings import Timings
from control.streams.frames import unpack_frames
from control.streams.functions import invoke, step
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import FinishReason, Usage
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.text.tokenizer import Tokenizer
from workers.delivery import Delivery
from workers.request_times import Received
from workers.scripted_model import make_scripted_model
from workers.settler import MAX_GROUP, Settler

BAR_ADDED_MS = 10.0
BAR_RATIO = 3.0
NUM_SETTLEMENTS = 2_000
RATE = 300.0
SECONDS = 10.0
KEYS = ModelKeys("bench")
REPLICA = "replica"
FOLLOWER = "reader"
PART = 500
LIMIT_S = 60.0

End = Callable[[Delivery], None]


@dataclass(frozen=True, slots=True)
class SettlementCost:
    """Settlements a second, and milliseconds from the last token to the ending at the rate."""

    single_per_s: float
    grouped_per_s: float
    unsettled_ms: Sequence[float]
    settled_ms: Sequence[float]

    @property
    def ratio(self) -> float:
        """What groups are worth."""
        return self.grouped_per_s / self.single_per_s

    @property
    def added_ms(self) -> float:
        """How much later the end is heard, at the 99th percentile."""
        return percentile(self.settled_ms, 0.99) - percentile(self.unsettled_ms, 0.99)

    @property
    def is_met(self) -> bool:
        """Whether both bars are met."""
        return self.ratio >= BAR_RATIO and self.added_ms <= BAR_ADDED_MS

    def figures(self) -> dict[str, float]:
        """What is written to a file."""
        return {
            "single_per_s": self.single_per_s,
            "grouped_per_s": self.grouped_per_s,
            "ratio": self.ratio,
            "unsettled_ms_p99": percentile(self.unsettled_ms, 0.99),
            "settled_ms_p50": percentile(self.settled_ms, 0.5),
            "settled_ms_p99": percentile(self.settled_ms, 0.99),
            "added_ms_p99": self.added_ms,
        }

    def table(self) -> str:
        """The measurement in words."""
        figures = self.figures()
        return "\n".join(
            [
                "settlements a second, one settler",
                f"  one by one               {self.single_per_s:8,.0f}",
                f"  in groups of {MAX_GROUP:<3}         {self.grouped_per_s:8,.0f}",
                f"  ratio                    {self.ratio:8.1f}   (bar {BAR_RATIO:g})",
                f"from the last token to the ending at {RATE:g} requests/s, ms",
                f"  p99 if nothing were settled {figures['unsettled_ms_p99']:5.1f}",
                f"  p50 settled              {figures['settled_ms_p50']:8.1f}",
                f"  p99 settled              {figures['settled_ms_p99']:8.1f}",
                f"  added p99                {self.added_ms:8.1f}   (bar {BAR_ADDED_MS:g})",
            ]
        )


def measure(num_settlements: int = NUM_SETTLEMENTS, seconds: float = SECONDS) -> SettlementCost:
    """Measure on servers of the benchmark's own."""
    with running_postgres() as url, running_valkey() as valkey, TemporaryDirectory() as folder:
        database = connect(url, "bench")
        try:
            tokenizer = Tokenizer.from_folder(make_scripted_model(Path(folder)))
            tenant = _tenant(database)
            single, grouped = (
                num_settlements / _settle_all(database, tenant, num_settlements, size)
                for size in (1, MAX_GROUP)
            )
            readers = _Readers(valkey.client, database, tokenizer, tenant)
            unsettled = readers.latencies(lambda d: _end_at_once(valkey.client, d), seconds)
            settler = Settler(valkey.client, database, KEYS, REPLICA)
            settler.start()
            settled = readers.latencies(settler.put, seconds)
            assert settler.close(LIMIT_S), "the settler does not end"
        finally:
            database.dispose()
    return SettlementCost(single, grouped, unsettled, settled)


def main(file: Path | None) -> None:
    """Print the measurement; the exit status says whether the bars were met."""
    result = measure()
    sys.stdout.write(f"{result.table()}\n")
    write_results(file, "settlement", result.figures())
    if not result.is_met:
        raise SystemExit(1)


def _tenant(database: Engine) -> str:
    with database.begin() as connection:
        return create_tenant(connection, "bench").tenant_id


def _hold(database: Engine, tenant_id: str, count: int) -> list[str]:
    """Held requests; their ids."""
    ids = [mint_request_id(time.time(), secrets.randbits(98)) for _ in range(count)]
    values = [
        {"created_at": created_at_of(i), "request_id": i, "tenant_id": tenant_id} for i in ids
    ]
    statement = text(
        """
        INSERT INTO requests (created_at, request_id, tenant_id, key_id, model, version,
                              weights_digest, priority_class, endpoint, reserved_tokens,
                              prompt_tokens)
        VALUES (:created_at, :request_id, :tenant_id, 'k', 'bench', 'v1', 'd', 'interactive',
                '/v1/completions', 20, 10)
        """
    )
    with database.begin() as connection:
        connection.execute(statement, values)
    return ids


def _settle_all(database: Engine, tenant_id: str, count: int, size: int) -> float:
    """Seconds that it takes to settle so many in groups of `size`, a transaction each."""
    settlements = [
        Settlement(
            request_id,
            1,
            Usage(10, 5),
            finish_reasons=(FinishReason.STOP,),
            replica_id=REPLICA,
            timings=Timings(0.1, 0.1, 0.1, 0.1),
        )
        for request_id in _hold(database, tenant_id, count)
    ]
    began = time.perf_counter()
    for start in range(0, count, size):
        with database.begin() as connection:
            settle(connection, settlements[start : start + size])
    return time.perf_counter() - began


class _Readers:
    """Requests that end at random instants, and one follower who notes when it hears of it."""

    def __init__(
        self, client: redis.Redis, database: Engine, tokenizer: Tokenizer, tenant_id: str
    ) -> None:
        self._client = client
        self._database = database
        self._tokenizer = tokenizer
        self._tenant_id = tenant_id

    def latencies(self, end: End, seconds: float) -> list[float]:
        """Milliseconds from the last token to the ending, sorted; `end` is to bring it about."""
        deliveries = self._deliveries(int(seconds * RATE))
        heard: dict[str, float] = {}
        feed = KEYS.feed(FOLLOWER)
        self._client.delete(feed)
        listener = threading.Thread(target=self._listen, args=(feed, heard, len(deliveries)))
        listener.start()
        ended: dict[str, float] = {}
        chance, due = Random(1), time.perf_counter()
        for delivery in deliveries:
            due += chance.expovariate(RATE)
            time.sleep(max(0.0, due - time.perf_counter()))
            ended[delivery.request.request_id] = time.perf_counter()
            end(delivery)
        listener.join(LIMIT_S)
        assert len(heard) == len(deliveries), f"{len(heard)} of {len(deliveries)} were told"
        return sorted(1000 * (heard[i] - at) for i, at in ended.items())

    def _deliveries(self, count: int) -> list[Delivery]:
        """Requests of which all tokens are out."""
        ids = _hold(self._database, self._tenant_id, count)
        deliveries = []
        for start in range(0, count, PART):
            requests = [(stream_request(i, range(10), 1), FOLLOWER) for i in ids[start:][:PART]]
            assignments = assign_requests(self._client, KEYS, REPLICA, requests)
            self._client.delete(KEYS.inbox(REPLICA))
            for assignment in assignments:
                delivery = Delivery(
                    assignment, self._tokenizer, [], Received(0.0, time.monotonic())
                )
                update = SequenceUpdate(
                    assignment.request_id, 0, (65,), SequenceEnd.LENGTH, scheduled_at=0.0
                )
                delta = delivery.take(update, time.monotonic())
                assert delta is not None
                invoke(self._client, step(KEYS, [delivery.publication([delta])]))
                deliveries.append(delivery)
        return deliveries

    def _listen(self, feed: str, heard: dict[str, float], count: int) -> None:
        last = "0"
        give_up = time.monotonic() + LIMIT_S
        while len(heard) < count and time.monotonic() < give_up:
            reply = self._client.xread({feed: last}, count=PART, block=1000)
            now = time.perf_counter()
            assert isinstance(reply, list)
            for _, entries in reply:
                for entry_id, fields in entries:
                    last = entry_id
                    for delta in unpack_frames(fields[b"d"]):
                        heard[delta.request_id] = now


def _end_at_once(client: redis.Redis, delivery: Delivery) -> None:
    settlement = delivery.settlement(REPLICA)
    invoke(client, step(KEYS, [delivery.last_delta(settlement.usage, settlement.error)]))
