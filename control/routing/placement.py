"""Which replica takes a request now, if any can.

Binding is late: a request waits in the queue until some replica has room for the KV that its
engine expects the request to need, and a free place in its batch. Among those that do, the one
with the most KV to spare takes it. An interactive request that finds none goes where it will if
batch-class work makes way for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control.fairness.virtual_time import Rates
from control.routing.replica_snapshot import ReplicaSnapshot
from control.streams.messages import QueueEntry
from engine.interface.generation_request import PriorityClass


@dataclass(frozen=True, slots=True)
class Load:
    """What was assigned to a replica after its last snapshot: in all, and of it batch class."""

    kv_tokens: int = 0
    num_sequences: int = 0
    batch_kv_tokens: int = 0
    num_batch_sequences: int = 0


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
    usable = [(s, since.get(s.replica_id, Load())) for s in snapshots if _is_usable(entry, s)]
    placement = _best(entry, [(s, _room(s, load)) for s, load in usable])
    if placement is None and entry.priority_class is PriorityClass.INTERACTIVE:
        # Nothing is stopped while there is room elsewhere.
        rooms = [(s, _room_if_batch_yields(s, load)) for s, load in usable]
        placement = _best(entry, rooms)
    return placement


def load_of(entries: Sequence[QueueEntry], snapshot: ReplicaSnapshot) -> Load:
    """What these requests, assigned to the snapshot's replica after it, come to."""
    batch = [entry for entry in entries if entry.priority_class is PriorityClass.BATCH]
    return Load(
        kv_tokens=sum(expected_kv_tokens(entry, snapshot) for entry in entries),
        num_sequences=sum(entry.num_sequences for entry in entries),
        batch_kv_tokens=sum(expected_kv_tokens(entry, snapshot) for entry in batch),
        num_batch_sequences=sum(entry.num_sequences for entry in batch),
    )


def expected_kv_tokens(entry: QueueEntry, snapshot: ReplicaSnapshot) -> int:
    """KV tokens that the replica's engine expects the request to need, over all choices."""
    expected = snapshot.expected_outputs.get(entry.cache_scope, snapshot.expected_output)
    if expected is None:
        return entry.max_kv_tokens
    return entry.max_kv_tokens - entry.num_sequences * max(0, entry.max_tokens - expected)


def expected_service(entry: QueueEntry, snapshot: ReplicaSnapshot, rates: Rates) -> float:
    """What the request is expected to cost its tenant, before it is known what is cached."""
    prompt_tokens = entry.max_kv_tokens - entry.num_sequences * entry.max_tokens
    output_tokens = expected_kv_tokens(entry, snapshot) - prompt_tokens
    return rates.charge(prompt_tokens, output_tokens)


def is_hopeless(entry: QueueEntry, snapshots: Iterable[ReplicaSnapshot]) -> bool:
    """Whether replicas serve the request's weights, and the pool of none can hold a choice."""
    pools = [s.kv_tokens_total for s in snapshots if s.weights_digest == entry.weights_digest]
    return bool(pools) and max(pools) < entry.max_choice_tokens


@dataclass(frozen=True, slots=True)
class _Room:
    """What a replica has for a request of some class, were it the next."""

    kv_tokens: int
    num_sequences: int
    is_idle: bool


def _is_usable(entry: QueueEntry, snapshot: ReplicaSnapshot) -> bool:
    return (
        snapshot.is_accepting
        and snapshot.weights_digest == entry.weights_digest
        and snapshot.kv_tokens_total >= entry.max_choice_tokens
    )


def _room(snapshot: ReplicaSnapshot, since: Load) -> _Room:
    return _Room(
        kv_tokens=snapshot.kv_tokens_free - since.kv_tokens,
        num_sequences=snapshot.num_sequences_free - since.num_sequences,
        is_idle=snapshot.kv_tokens_free == snapshot.kv_tokens_total and not since.num_sequences,
    )


def _room_if_batch_yields(snapshot: ReplicaSnapshot, since: Load) -> _Room:
    kv_tokens_free = snapshot.kv_tokens_free + snapshot.kv_tokens_yielding
    num_since = since.num_sequences - since.num_batch_sequences
    return _Room(
        kv_tokens=kv_tokens_free - (since.kv_tokens - since.batch_kv_tokens),
        num_sequences=snapshot.num_interactive_free - num_since,
        is_idle=kv_tokens_free == snapshot.kv_tokens_total and not num_since,
    )


def _best(entry: QueueEntry, rooms: Iterable[tuple[ReplicaSnapshot, _Room]]) -> Placement | None:
    placements = []
    for snapshot, room in rooms:
        kv_tokens_left = room.kv_tokens - expected_kv_tokens(entry, snapshot)
        if room.is_idle:
            placements.append(Placement(snapshot.replica_id, max(kv_tokens_left, 0)))
        elif room.num_sequences >= entry.num_sequences and kv_tokens_left >= 0:
            placements.append(Placement(snapshot.replica_id, kv_tokens_left))
    # The id breaks ties, so that the same facts give the same choice.
    return max(placements, key=lambda p: (p.kv_tokens_left, p.replica_id), default=None)
