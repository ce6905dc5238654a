"""Replica snapshots in Redis: pushed by the replica, gone with its heartbeat."""

from typing import cast

import msgspec
import redis

from control.routing.replica_snapshot import ReplicaSnapshot
from control.streams.keys import ModelKeys

HEARTBEAT_LIFE_MS = 5000
SERVING_LIFE_MS = 60_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReplicaSnapshot)


def report(client: redis.Redis, snapshot: ReplicaSnapshot) -> None:
    """Say what the replica is and that it lives."""
    keys = ModelKeys(snapshot.model)
    pipeline = client.pipeline(transaction=False)
    pipeline.set(keys.replica(snapshot.replica_id), _encoder.encode(snapshot), px=HEARTBEAT_LIFE_MS)
    pipeline.sadd(keys.replicas, snapshot.replica_id)
    pipeline.set(keys.serving(snapshot.weights_digest), b"1", px=SERVING_LIFE_MS)
    pipeline.execute()


def read_snapshots(
    client: redis.Redis, keys: ModelKeys
) -> tuple[dict[str, ReplicaSnapshot], frozenset[str]]:
    """The living replicas' snapshots by id, and the ids whose heartbeat has stopped."""
    members = cast("set[bytes]", client.smembers(keys.replicas))
    replica_ids = sorted(member.decode() for member in members)
    if not replica_ids:
        return {}, frozenset()
    names = [keys.replica(replica_id) for replica_id in replica_ids]
    packed = cast("list[bytes | None]", client.mget(names))
    living, silent = {}, set()
    for replica_id, data in zip(replica_ids, packed, strict=True):
        if data is None:
            silent.add(replica_id)
        else:
            living[replica_id] = _decoder.decode(data)
    return living, frozenset(silent)


def retire(client: redis.Redis, keys: ModelKeys, replica_id: str) -> None:
    """Forget a replica that is gone and whose requests have been taken care of."""
    pipeline = client.pipeline(transaction=False)
    pipeline.srem(keys.replicas, replica_id)
    pipeline.delete(keys.replica(replica_id), keys.inbox(replica_id))
    pipeline.execute()
