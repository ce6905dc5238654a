"""Batches through real Celery workers, the real dispatcher and a replica that says prompts back."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest
import redis
from sqlalchemy import text

from control.batches.batch import Batch
from control.batches.doorbell import QUEUE, Doorbell, ring_due_batches
from control.batches.store import cancel_batch
from control.database.connection import connect_async
from control.files.store import LocalFileStore
from control.identity.tenants import set_suspended
from engine.interface.generation_request import PriorityClass
from tests.workers.batch_hostile import MARK, hostile_entries
from tests.workers.batch_tier import (
    TERMINAL,
    BatchTier,
    Line,
    batch_worker,
    completion,
    jsonl,
    kill,
    worker_environment,
)
from tests.workers.service import Service, until
from workers.batch_dead_letters import DEAD_LETTERS, MAX_DEAD_LETTERS, MAX_LETTER_CHARS
from workers.batch_window import LOOK_S

END_S = 60


@dataclass(slots=True)
class Tier:
    """A served model, its tenant's batches, and how to start a worker."""

    service: Service
    batches: BatchTier
    environment: dict[str, str]
    log: Path

    def worker(self) -> AbstractContextManager[Popen[bytes]]:
        """A batch worker process."""
        return batch_worker(self.environment, self.log)

    async def end_of(self, batch_id: str) -> Batch:
        """The batch once it has ended."""
        await asyncio.to_thread(until, lambda: self.status(batch_id) in TERMINAL, END_S)
        return await self.batches.show(batch_id)

    def status(self, batch_id: str) -> str:
        """The batch's state now."""
        with self.service.database.connect() as connection:
            return str(
                connection.execute(
                    text("SELECT status FROM batches WHERE batch_id = :batch_id"),
                    {"batch_id": batch_id},
                ).scalar_one()
            )

    async def until_there_are(self, batch_id: str, count: int, state: str) -> None:
        """Wait until so many lines are in a state; running ones count once accepted."""
        await asyncio.to_thread(until, lambda: self.count(batch_id, state) >= count, END_S)

    def count(self, batch_id: str, state: str) -> int:
        """Lines in a state."""
        with self.service.database.connect() as connection:
            return int(
                connection.execute(
                    text(
                        "SELECT count(*) FROM batch_items i LEFT JOIN requests r "
                        "ON r.request_id = i.request_id "
                        "WHERE i.batch_id = :batch_id AND i.state = :state "
                        "AND (i.state <> 'running' OR r.request_id IS NOT NULL)"
                    ),
                    {"batch_id": batch_id, "state": state},
                ).scalar_one()
            )

    def usage_rows(self, batch_id: str) -> list[tuple[str, int]]:
        """(outcome, completion tokens) of every request that the batch's lines ever were."""
        with self.service.database.connect() as connection:
            rows = connection.execute(
                text("SELECT outcome, completion_tokens FROM usage_events WHERE model = :model"),
                {"model": self.service.model},
            )
            return [tuple(row) for row in rows]


@pytest.fixture
async def tier(
    service: Service, database_url: str, redis_url: str, broker_url: str, tmp_path: Path
) -> AsyncIterator[Tier]:
    """The batch tier around it, its broker empty."""
    _broker(broker_url).flushdb()
    database = connect_async(database_url, "test batches")
    doorbell = Doorbell(broker_url)
    store = LocalFileStore(tmp_path / "data" / "files")
    batches = BatchTier(database, store, service.tenant.tenant_id, doorbell)
    environment = worker_environment(database_url, redis_url, broker_url, tmp_path / "data")
    yield Tier(service, batches, environment, tmp_path / "worker.log")
    doorbell.close()
    await database.dispose()


async def test_a_batch_is_answered_line_by_line_in_its_own_order(tier: Tier) -> None:
    tier.service.start_replica()
    model = tier.service.model
    lines = [completion(f"id {i} é", model, f"prompt {i}") for i in range(20)]
    lines.insert(7, completion("too hot", model, "x", temperature=9))
    lines.insert(9, completion("streamed", model, "x", stream=True))
    lines.insert(11, completion("too long", model, "x" * 600))
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines) + b"\n")
        batch = await tier.end_of(batch_id)
    assert batch.status == "completed", (batch, tier.log.read_text())
    assert batch.model == f"{model}@v1"
    progress = batch.progress
    assert (progress.total, progress.completed, progress.failed) == (23, 20, 3)
    output = await tier.batches.read_lines(batch.output_file_id)
    errors = await tier.batches.read_lines(batch.error_file_id)
    assert [line["custom_id"] for line in output] == [f"id {i} é" for i in range(20)]
    assert [line["custom_id"] for line in errors] == ["too hot", "streamed", "too long"]
    for number, line in enumerate(output):
        body = line["response"]["body"]
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert body["object"] == "text_completion"
        assert body["id"] == "cmpl-" + line["response"]["request_id"].removeprefix("req_")
        assert body["choices"][0]["text"] == f"prompt {number}"
        assert body["choices"][0]["finish_reason"] == "stop"
    assert [line["response"]["status_code"] for line in errors] == [400, 400, 400]
    assert [line["response"]["body"]["error"]["param"] for line in errors] == [
        "temperature",
        "stream",
        "prompt",
    ]
    assert errors[2]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    told = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    assert progress.output_tokens == told == sum(n for _, n in tier.usage_rows(batch_id))


async def test_a_chat_line_is_answered_as_over_http(tier: Tier) -> None:
    tier.service.start_replica()
    url = "/v1/chat/completions"
    body = {"model": f"{tier.service.model}@v1", "max_completion_tokens": 9, "n": 2}
    body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
    body |= {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
    lines: list[Line] = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
    refused = body | {"messages": [{"role": "tool", "content": "x"}]}
    lines += [{"custom_id": "b", "method": "POST", "url": url, "body": refused}]
    with tier.worker():
        batch = await tier.end_of(await tier.batches.create(jsonl(lines), endpoint=url))
    [answered] = await tier.batches.read_lines(batch.output_file_id)
    reply = answered["response"]["body"]
    assert reply["object"] == "chat.completion"
    assert reply["model"] == f"{tier.service.model}@v1"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert {choice["message"]["role"] for choice in reply["choices"]} == {"assistant"}
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert reply["usage"]["completion_tokens"] == 18 == batch.progress.output_tokens
    assert reply["usage"]["prompt_tokens"] == batch.progress.input_tokens
    assert [len(choice["logprobs"]["content"]) for choice in reply["choices"]] == [9, 9]
    entry = reply["choices"][1]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], len(entry["top_logprobs"])) == (
        "<|im_start|>",
        -0.5,
        2,
    )
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    [failed] = await tier.batches.read_lines(batch.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "unsupported_parameter"


async def test_lines_that_redis_lost_are_asked_for_again(tier: Tier) -> None:
    lines = [completion(str(i), tier.service.model, f"prompt {i}") for i in range(8)]
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines))
        await tier.until_there_are(batch_id, 8, "running")
        client, keys = tier.service.client, tier.service.keys
        await asyncio.to_thread(until, lambda: client.xlen(keys.queue(PriorityClass.BATCH)) == 8)
        client.delete(*client.scan_iter(match=f"{{{tier.service.model}}}:*"))
        tier.service.start_replica()
        batch = await tier.end_of(batch_id)
    assert (batch.status, batch.progress.completed) == ("completed", 8)
    assert [outcome for outcome, _ in tier.usage_rows(batch_id)] == ["finished"] * 8


async def test_a_bad_file_fails_the_batch_and_names_its_lines(tier: Tier) -> None:
    model = tier.service.model
    lines = [completion("a", model, "x"), completion("a", model, "x")]
    lines += [completion("c", "nobody", "x"), completion("d", model, "x") | {"method": "GET"}]
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines) + b"{]")
        batch = await tier.end_of(batch_id)
    assert batch.status == "failed"
    assert [(e["line"], e["code"]) for e in batch.errors["data"]] == [
        (2, "duplicate_custom_id"),
        (3, "model_not_found"),
        (4, "invalid_method"),
        (5, "invalid_json_line"),
    ]
    assert batch.progress.total == 0
    assert batch.output_file_id is None
    assert batch.error_file_id is None


async def test_a_killed_workers_lines_are_finished_by_the_next_and_computed_once(
    tier: Tier,
) -> None:
    tier.service.start_replica(delay_ms=30)
    model = tier.service.model
    lines = [completion(str(i), model, f"words {i:02} " * 4) for i in range(16)]
    with tier.worker() as first:
        batch_id = await tier.batches.create(jsonl(lines))
        await tier.until_there_are(batch_id, 8, "running")
        kill(first)
    # As after the half minute for which a dead worker still holds its lines.
    with tier.service.database.begin() as connection:
        connection.execute(
            text(
                "UPDATE batch_items SET leased_until = now()"
                " WHERE batch_id = :batch_id AND leased_until IS NOT NULL"
            ),
            {"batch_id": batch_id},
        )
    with tier.worker():
        batch = await tier.end_of(batch_id)
    assert (batch.status, batch.progress.completed) == ("completed", 16)
    output = await tier.batches.read_lines(batch.output_file_id)
    assert [line["response"]["body"]["choices"][0]["text"] for line in output] == [
        f"words {i:02} " * 4 for i in range(16)
    ]
    # No token was computed or billed twice: one finished request for every line, and no other.
    assert [outcome for outcome, _ in tier.usage_rows(batch_id)] == ["finished"] * 16


async def test_a_drained_worker_gives_its_leases_back_at_once(tier: Tier) -> None:
    tier.service.start_replica(delay_ms=100)
    model = tier.service.model
    lines = [completion(str(i), model, "slow words " * 5) for i in range(8)]
    with tier.worker() as first:
        batch_id = await tier.batches.create(jsonl(lines))
        await tier.until_there_are(batch_id, 8, "running")
        started = time.monotonic()
        first.send_signal(signal.SIGTERM)
        await tier.until_there_are(batch_id, 8, "available")
        assert time.monotonic() - started < 3
        assert await asyncio.to_thread(first.wait, 20) == 0
        assert time.monotonic() - started < 12
    with tier.worker():
        batch = await tier.end_of(batch_id)
    assert (batch.status, batch.progress.completed) == ("completed", 8)
    assert [outcome for outcome, _ in tier.usage_rows(batch_id)] == ["finished"] * 8


async def test_a_cancelled_batch_stops_what_runs_and_gives_out_what_ended(tier: Tier) -> None:
    replica = tier.service.start_replica(delay_ms=20)
    model = tier.service.model
    lines = [completion(f"fast {i}", model, "x") for i in range(4)]
    lines += [completion(f"slow {i}", model, "y" * 200, max_tokens=200) for i in range(20)]
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines))
        await tier.until_there_are(batch_id, 4, "completed")
        async with tier.batches.database.begin() as connection:
            tenant_id = tier.service.tenant.tenant_id
            batch = await cancel_batch(connection, tenant_id, batch_id)
        assert batch.status == "cancelling"
        batch = await tier.end_of(batch_id)
    assert batch.status == "cancelled"
    output = await tier.batches.read_lines(batch.output_file_id)
    errors = await tier.batches.read_lines(batch.error_file_id)
    ids = [line["custom_id"] for line in (*output, *errors)]
    assert sorted(ids) == sorted(str(line["custom_id"]) for line in lines)
    assert len(errors) >= 12
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert (batch.progress.completed, batch.progress.failed) == (len(output), len(errors))
    until_free = replica.replica.snapshot
    assert until_free().num_running == 0


async def test_a_batch_past_its_window_expires_with_what_it_has(tier: Tier) -> None:
    model = tier.service.model  # Nobody serves it, so no line can end by itself.
    lines = [completion(str(i), model, "x") for i in range(12)]
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines), window="1h")
        await tier.until_there_are(batch_id, 8, "running")
        with tier.service.database.begin() as connection:
            connection.execute(
                text("UPDATE batches SET expires_at = now() WHERE batch_id = :batch_id"),
                {"batch_id": batch_id},
            )
        batch = await tier.end_of(batch_id)
    assert batch.status == "expired"
    assert batch.moments.finalizing_at is not None
    errors = await tier.batches.read_lines(batch.error_file_id)
    assert [line["custom_id"] for line in errors] == [str(i) for i in range(12)]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert batch.output_file_id is None


def due_batches(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that maintenance would ring for now."""
    rung: list[str] = []

    def ring(batch_id: str) -> bool:
        rung.append(batch_id)
        return True

    with monkeypatch.context() as patch, tier.service.database.connect() as connection:
        patch.setattr(tier.batches.doorbell, "ring", ring)
        ring_due_batches(connection, tier.batches.doorbell)
    return rung


async def test_a_suspended_tenants_batch_begins_no_line_and_goes_on_when_it_is_resumed(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tenant_id = tier.service.model, tier.batches.tenant_id
    tier.environment |= {"HEADRACE_BATCH_WINDOW": "8", "HEADRACE_BATCH_TURNS": "1"}
    lines = [completion(str(i), model, "x") for i in range(12)]
    with tier.worker():
        batch_id = await tier.batches.create(jsonl(lines))
        await tier.until_there_are(batch_id, 8, "running")
        with tier.service.database.begin() as connection:
            set_suspended(connection, tenant_id, True)
        # The worker looks once a second: nothing may end, and make room, before it has.
        await asyncio.sleep(2 * LOOK_S)
        tier.service.start_replica()
        await tier.until_there_are(batch_id, 8, "completed")
        assert tier.count(batch_id, "available") == 4
        assert batch_id not in due_batches(tier, monkeypatch)
        with tier.service.database.begin() as connection:
            set_suspended(connection, tenant_id, False)
        assert tier.count(batch_id, "available") == 4
        assert batch_id in due_batches(tier, monkeypatch)
        assert tier.batches.doorbell.ring(batch_id)
        batch = await tier.end_of(batch_id)
    assert batch.status == "completed"
    assert (batch.progress.completed, batch.progress.failed) == (12, 0)


async def test_a_lost_doorbell_is_rung_again(tier: Tier) -> None:
    tier.service.start_replica()
    with tier.worker():
        batch_id = await tier.batches.create(
            jsonl([completion("a", tier.service.model, "x")]), ring=False
        )
        with tier.service.database.connect() as connection:
            assert ring_due_batches(connection, tier.batches.doorbell) >= 1
        assert (await tier.end_of(batch_id)).status == "completed"


async def test_a_worker_lives_through_messages_that_are_no_doorbell(
    tier: Tier, broker_url: str
) -> None:
    tier.service.start_replica()
    broker = _broker(broker_url)
    with tier.worker() as worker:
        trace = tier.log.with_name("code-ran")
        _send_hostile_messages(broker_url, str(trace))
        batch_id = await tier.batches.create(jsonl([completion("a", tier.service.model, "x")]))
        assert (await tier.end_of(batch_id)).status == "completed"
        await asyncio.to_thread(until, lambda: not broker.llen(QUEUE))
        assert worker.poll() is None
    assert not trace.exists()
    assert broker.llen(DEAD_LETTERS) == 7
    assert "put aside: ContentDisallowed" in tier.log.read_text()


async def test_an_envelope_that_nothing_can_read_stops_no_worker_and_is_put_aside(
    tier: Tier, broker_url: str
) -> None:
    tier.service.start_replica()
    broker = _broker(broker_url)
    hostile = hostile_entries()
    with tier.worker() as worker:
        for entry in hostile:
            broker.lpush(QUEUE, entry)
        batch_id = await tier.batches.create(jsonl([completion("a", tier.service.model, "x")]))
        assert (await tier.end_of(batch_id)).status == "completed", tier.log.read_text()
        assert worker.poll() is None
        await asyncio.to_thread(until, lambda: not broker.hlen("unacked"))
        assert broker.llen(DEAD_LETTERS) == len(hostile)
        assert MARK not in tier.log.read_text()

        for _ in range(MAX_DEAD_LETTERS + 20):
            broker.lpush(QUEUE, b"{" * 10_000)
        await asyncio.to_thread(until, lambda: not broker.llen(QUEUE))
        batch_id = await tier.batches.create(jsonl([completion("a", tier.service.model, "x")]))
        assert (await tier.end_of(batch_id)).status == "completed"
        assert worker.poll() is None
    letters = broker.lrange(DEAD_LETTERS, 0, -1)
    assert len(letters) == MAX_DEAD_LETTERS
    assert max(map(len, letters)) == MAX_LETTER_CHARS


async def test_a_line_fails_if_the_tokenizer_is_not_the_registered_one(tier: Tier) -> None:
    tier.service.start_replica()
    tokenizer = Path(tier.service.version.weights_folder) / "tokenizer.json"
    registered = tokenizer.read_bytes()
    tokenizer.write_bytes(registered + b" ")
    with tier.worker():
        batch_id = await tier.batches.create(jsonl([completion("a", tier.service.model, "x")]))
        batch = await tier.end_of(batch_id)
    # A gateway of a later test finds the version in the registry too.
    tokenizer.write_bytes(registered)
    assert (batch.progress.completed, batch.progress.failed) == (0, 1)


def _broker(broker_url: str) -> redis.Redis:
    path, _, db = broker_url.removeprefix("redis+socket://").partition("?virtual_host=")
    return redis.Redis(unix_socket_path=path, db=int(db))


@dataclass
class _Bomb:
    """What pickle would run on being read."""

    trace: str

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.trace, "w")


def _send_hostile_messages(broker_url: str, trace: str) -> None:
    from celery import Celery
    from kombu import serialization

    serialization.enable_insecure_serializers(["pickle", "yaml"])  # type: ignore[no-untyped-call]  # Kombu has no types
    sender = Celery(broker=broker_url, set_as_current=False)
    sender.conf.task_default_queue = QUEUE
    task = "headrace.carry_batch"
    sender.send_task(task, args=(_Bomb(trace),), serializer="pickle")
    yaml_bomb = f"!!python/object/apply:builtins.open ['{trace}', 'w']"
    sender.send_task(task, args=(yaml_bomb,), serializer="yaml")
    sender.send_task("os.system", args=(f"touch {trace}",))
    sender.send_task(task, args=({"not": "an id"},))
    sender.send_task(task, args=("batch_'; DROP TABLE batches; --",))
    sender.send_task(task, args=("batch_" + "0" * 26,))
    sender.send_task(task, args=())
    with sender.connection_for_write() as connection:
        connection.SimpleQueue(QUEUE).put(b"\x00\xff", content_type="application/json")
    sender.close()
