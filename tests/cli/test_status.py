"""A row of `headrace status` says how a replica fares."""

from dataclasses import replace

from cli.status import row_of
from control.routing.replica_snapshot import ReplicaSnapshot

OLD = ReplicaSnapshot("r-1", "m", "v1", "digest", True, 1024, 512, 64, 40, 8, 3, 2, 77, 99)
NEW = replace(
    OLD,
    cached_tokens_total=160,
    preemptions_total=4,
    inter_token_target_ms=40.0,
    inter_token_ms=31.4,
)


def test_a_row_says_how_a_replica_fares() -> None:
    assert row_of(NEW) == (
        "r-1",
        "v1",
        "yes",
        "3 of 8",
        "2",
        "40 of 64",
        "99",
        "160",
        "4",
        "31 (aim 40)",
    )


def test_a_replica_that_has_measured_nothing_claims_no_pace() -> None:
    assert row_of(OLD)[-3:] == ("0", "0", "")


def test_a_stalled_replica_is_told_from_one_that_leaves() -> None:
    leaving = replace(OLD, is_accepting=False)
    assert row_of(leaving)[2] == "no"
    assert row_of(replace(leaving, is_stalled=True))[2] == "stalled"
