"""Snapshots travel through Redis whole, and those of older replicas are still understood."""

import dataclasses
import secrets

import msgspec
import pytest
import redis

from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import read_snapshots, report, retire
from control.streams.connection import connect
from control.streams.keys import ModelKeys

# What a replica did not yet say before it told operators how it fares.
LATER_FIELDS = {
    "is_stalled",
    "stalls_total",
    "preemptions_total",
    "cached_tokens_total",
    "inter_token_target_ms",
    "inter_token_ms",
    "prefill_tokens",
    "expected_output",
    "expected_outputs",
}


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    """A client of the test server."""
    return connect(redis_url)


@pytest.fixture
def snapshot() -> ReplicaSnapshot:
    """A snapshot of a model of its own, every field unlike its default."""
    return ReplicaSnapshot(
        replica_id="r1",
        model=f"model-{secrets.token_hex(4)}",
        version="v1",
        weights_digest="digest",
        is_accepting=False,
        kv_tokens_total=1024,
        kv_tokens_free=512,
        kv_blocks_total=64,
        kv_blocks_free=40,
        num_sequences_max=8,
        num_running=3,
        num_waiting=2,
        steps_total=77,
        tokens_total=99,
        last_order="5-1",
        is_stalled=True,
        stalls_total=1,
        preemptions_total=4,
        cached_tokens_total=160,
        inter_token_target_ms=40.0,
        inter_token_ms=31.5,
        prefill_tokens=64,
        expected_output=300,
        expected_outputs={"scope": 25},
    )


def test_what_a_replica_said_is_read_back_whole(
    client: redis.Redis, snapshot: ReplicaSnapshot
) -> None:
    keys = ModelKeys(snapshot.model)
    report(client, snapshot)
    assert read_snapshots(client, keys) == ({"r1": snapshot}, frozenset())
    retire(client, keys, "r1")
    assert read_snapshots(client, keys) == ({}, frozenset())


def test_an_older_replicas_snapshot_is_read_with_the_new_fields_at_rest(
    client: redis.Redis, snapshot: ReplicaSnapshot
) -> None:
    keys = ModelKeys(snapshot.model)
    said = {k: v for k, v in dataclasses.asdict(snapshot).items() if k not in LATER_FIELDS}
    client.sadd(keys.replicas, "r1")
    client.set(keys.replica("r1"), msgspec.msgpack.encode(said), px=60_000)
    living, _ = read_snapshots(client, keys)
    assert living["r1"] == ReplicaSnapshot(**said)
    assert not living["r1"].is_stalled


def test_a_newer_replicas_unknown_fields_are_passed_over(
    client: redis.Redis, snapshot: ReplicaSnapshot
) -> None:
    keys = ModelKeys(snapshot.model)
    said = dataclasses.asdict(snapshot) | {"mood": "calm"}
    client.sadd(keys.replicas, "r1")
    client.set(keys.replica("r1"), msgspec.msgpack.encode(said), px=60_000)
    living, _ = read_snapshots(client, keys)
    assert living["r1"] == snapshot
