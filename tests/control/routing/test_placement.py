"""Where a request goes: only where it fits, only on its weights, in a fair order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from control.routing.placement import Load, place
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.waiting_requests import WaitingRequests
from control.streams.messages import QueueEntry
from engine.interface.generation_request import PriorityClass

ENTRY = QueueEntry("r", "t", PriorityClass.INTERACTIVE, "d", 1, 100, 0.0, 60.0)
REPLICA = ReplicaSnapshot("a", "m", "v1", "d", True, 1000, 500, 60, 30, 8, 4, 0, 0, 0)


def test_the_replica_with_most_room_takes_it() -> None:
    other = replace(REPLICA, replica_id="b", kv_tokens_free=600)
    placement = place(ENTRY, [REPLICA, other], {})
    assert placement is not None
    assert (placement.replica_id, placement.kv_tokens_left) == ("b", 500)


def test_other_weights_never_take_it() -> None:
    assert place(ENTRY, [replace(REPLICA, weights_digest="e")], {}) is None


def test_a_draining_replica_takes_nothing() -> None:
    assert place(ENTRY, [replace(REPLICA, is_accepting=False)], {}) is None


def test_what_was_assigned_since_the_snapshot_counts() -> None:
    assert place(ENTRY, [REPLICA], {"a": Load(401, 1)}) is None
    assert place(ENTRY, [REPLICA], {"a": Load(400, 1)}) is not None
    assert place(ENTRY, [REPLICA], {"a": Load(0, 4)}) is None


def test_a_request_larger_than_the_pool_goes_to_an_idle_replica_only() -> None:
    large = replace(ENTRY, max_kv_tokens=5000, num_sequences=32)
    assert place(large, [REPLICA], {}) is None
    idle = replace(REPLICA, kv_tokens_free=1000, num_running=0)
    assert place(large, [idle], {}) is not None
    assert place(large, [idle], {"a": Load(1, 1)}) is None


arrivals = st.lists(st.tuples(st.sampled_from(PriorityClass), st.integers(0, 9)), max_size=30)


@given(arrivals, st.sets(st.integers(0, 29)))
def test_requests_leave_by_class_then_arrival_whatever_is_forgotten(
    facts: list[tuple[PriorityClass, int]], forgotten: set[int]
) -> None:
    waiting, entries = WaitingRequests(), []
    for number, (priority_class, arrival) in enumerate(facts):
        entry = replace(
            ENTRY, request_id=f"{number:02}", priority_class=priority_class, arrival=arrival
        )
        waiting.add(entry)
        waiting.add(entry)
        entries.append(entry)
        waiting.check()
    for number in forgotten:
        waiting.discard(f"{number:02}")
    left = [e for number, e in enumerate(entries) if number not in forgotten]
    left.sort(
        key=lambda e: (e.priority_class != PriorityClass.INTERACTIVE, e.arrival, e.request_id)
    )
    served = []
    while (head := waiting.head()) is not None:
        served.append(head)
        waiting.discard(head.request_id)
        waiting.check()
    assert served == left
    assert len(waiting) == 0
