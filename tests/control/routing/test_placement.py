"""Where a request goes: only where it fits, only on its weights, in a fair order."""

from dataclasses import replace

from control.routing.placement import Load, expected_kv_tokens, is_hopeless, load_of, place
from control.routing.replica_snapshot import ReplicaSnapshot
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


# Full of batch-class work, but for one sequence that somebody reads.
BUSY = replace(REPLICA, kv_tokens_free=20, num_running=8, kv_tokens_yielding=700)
BUSY = replace(BUSY, num_sequences_yielding=7)
BATCH_ENTRY = replace(ENTRY, priority_class=PriorityClass.BATCH)


def test_batch_work_makes_way_for_an_interactive_request_and_for_no_other() -> None:
    placement = place(ENTRY, [BUSY], {})
    assert placement is not None
    assert placement.kv_tokens_left == 20 + 700 - 100
    assert place(BATCH_ENTRY, [BUSY], {}) is None


def test_no_batch_work_is_stopped_while_there_is_room_elsewhere() -> None:
    roomy = replace(REPLICA, replica_id="b", kv_tokens_free=120)
    placement = place(ENTRY, [BUSY, roomy], {})
    assert placement is not None
    assert (placement.replica_id, placement.kv_tokens_left) == ("b", 20)


def test_batch_work_that_cannot_be_stopped_gives_no_place() -> None:
    assert place(ENTRY, [replace(BUSY, kv_tokens_yielding=70)], {}) is None
    assert place(ENTRY, [replace(BUSY, num_sequences_yielding=0)], {}) is None


def test_only_interactive_orders_since_the_snapshot_take_what_batch_work_leaves() -> None:
    batch = [replace(BATCH_ENTRY, request_id=str(i)) for i in range(20)]
    assert place(ENTRY, [BUSY], {"a": load_of(batch, BUSY)}) is not None
    readers = [replace(ENTRY, request_id=str(i)) for i in range(7)]
    assert place(ENTRY, [BUSY], {"a": load_of(readers[:6], BUSY)}) is not None
    assert place(ENTRY, [BUSY], {"a": load_of(readers, BUSY)}) is None


def test_a_large_request_goes_to_a_replica_that_only_batch_work_keeps_from_being_idle() -> None:
    large = replace(ENTRY, max_kv_tokens=5000, num_sequences=32)
    assert place(large, [BUSY], {}) is None
    only_batch = replace(BUSY, kv_tokens_yielding=980, num_sequences_yielding=8)
    assert place(large, [only_batch], {}) is not None
    assert place(large, [only_batch], {"a": load_of([ENTRY], only_batch)}) is None


# A prompt of 40 tokens for two choices that may say 400 each.
TALKER = replace(
    ENTRY,
    num_sequences=2,
    max_kv_tokens=2 * (40 + 400),
    cache_scope="scope",
    max_tokens=400,
    max_choice_tokens=440,
)
LEARNED = replace(REPLICA, expected_output=300, expected_outputs={"scope": 25})


def test_an_output_counts_as_long_as_the_engine_expects_it_to_become() -> None:
    assert expected_kv_tokens(TALKER, LEARNED) == 2 * (40 + 25)
    assert expected_kv_tokens(replace(TALKER, cache_scope="other"), LEARNED) == 2 * (40 + 300)
    placement = place(TALKER, [LEARNED], {})
    assert placement is not None
    assert placement.kv_tokens_left == 500 - 2 * (40 + 25)


def test_an_output_never_counts_longer_than_it_may_become() -> None:
    unlearned = replace(REPLICA, expected_output=100_000)
    assert expected_kv_tokens(TALKER, unlearned) == TALKER.max_kv_tokens
    assert place(TALKER, [unlearned], {}) is None


def test_without_an_expectation_or_a_limit_a_request_counts_in_full() -> None:
    assert expected_kv_tokens(TALKER, REPLICA) == TALKER.max_kv_tokens
    old = replace(TALKER, cache_scope="", max_tokens=0, max_choice_tokens=0)
    assert expected_kv_tokens(old, LEARNED) == TALKER.max_kv_tokens


def test_a_request_never_goes_where_a_choice_could_not_end() -> None:
    small = replace(LEARNED, kv_tokens_total=439, kv_tokens_free=439, num_running=0)
    assert place(TALKER, [small], {}) is None
    assert is_hopeless(TALKER, [small])
    exact = replace(small, replica_id="b", kv_tokens_total=440, kv_tokens_free=440)
    placement = place(TALKER, [small, exact], {})
    assert placement is not None
    assert placement.replica_id == "b"


def test_there_is_hope_while_a_large_enough_replica_is_full_and_where_nobody_serves() -> None:
    assert not is_hopeless(TALKER, [replace(REPLICA, kv_tokens_free=0, is_accepting=False)])
    assert not is_hopeless(TALKER, [])
    assert not is_hopeless(TALKER, [replace(REPLICA, weights_digest="e", kv_tokens_total=1)])
