"""Which replica takes a request now, if any can.

Binding is late: a request waits in the queue until some replica has room for the KV that its
engine expects the request to need, and a free place in its batch. Among those that do, the one
with the most KV to spare takes it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control.routing.replica_snapshot import ReplicaSnapshot
from control.streams.messages import QueueEntry


@dataclass(frozen=True, slots=True)
class Load:
    """What was assigned to a replica after its last snapshot."""

    kv_tokens: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The replica chosen, and the KV tokens it will have to spare."""

    replica_id: str
    kv_tokens_left: int


def place(
    entry: QueueEntry, snapshots: Iterable[ReplicaSnapshot], since: Mapping[str, Load]
) -> Placement | None:
    """The best replica that can take the request now, or None.

    A request that may come to more than a whole pool goes to an idle replica, where its
    sequences join one after another; but never to one that could not hold a single of them.
    """
    placements = [
        Placement(snapshot.replica_id, kv_tokens_left)
        for snapshot in snapshots
        if (kv_tokens_left := _room(entry, snapshot, since.get(snapshot.replica_id, Load())))
        is not None
    ]
    # The id breaks ties, so that the same facts give the same choice.
    return max(placements, key=lambda p: (p.kv_tokens_left, p.replica_id), default=None)


def expected_kv_tokens(entry: QueueEntry, snapshot: ReplicaSnapshot) -> int:
    """KV tokens that the replica's engine expects the request to need, over all choices."""
    expected = snapshot.expected_outputs.get(entry.cache_scope, snapshot.expected_output)
    if expected is None:
        return entry.max_kv_tokens
    return entry.max_kv_tokens - entry.num_sequences * max(0, entry.max_tokens - expected)


def is_hopeless(entry: QueueEntry, snapshots: Iterable[ReplicaSnapshot]) -> bool:
    """Whether replicas serve the request's weights, and the pool of none can hold a choice."""
    pools = [s.kv_tokens_total for s in snapshots if s.weights_digest == entry.weights_digest]
    return bool(pools) and max(pools) < entry.max_choice_tokens


def _room(entry: QueueEntry, snapshot: ReplicaSnapshot, since: Load) -> int | None:
    if not snapshot.is_accepting or snapshot.weights_digest != entry.weights_digest:
        return None
    if snapshot.kv_tokens_total < entry.max_choice_tokens:
        return None
    num_sequences_free = snapshot.num_sequences_free - since.num_sequences
    expected = expected_kv_tokens(entry, snapshot)
    kv_tokens_left = snapshot.kv_tokens_free - since.kv_tokens - expected
    is_idle = snapshot.kv_tokens_free == snapshot.kv_tokens_total and since.num_sequences == 0
    if is_idle:
        return max(kv_tokens_left, 0)
    if num_sequences_free < entry.num_sequences or kv_tokens_left < 0:
        return None
    return kv_tokens_left
