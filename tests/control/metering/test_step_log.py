"""The step log: all that was produced, from whole records, as far back as it is kept."""

from pathlib import Path

from control.metering.step_log import (
    Produced,
    StepLog,
    dead_replicas,
    living_replicas,
    mark_booked,
    read_step_log,
    read_step_logs,
    remove_old,
)


def test_attempts_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = StepLog(tmp_path, "replica-1", "m")
    steps.begin("a", 1, 0)
    steps.step({"a": 3})
    steps.begin("b", 2, 7)
    steps.step({"a": 1, "b": 2})
    steps.end("a")
    steps.begin("a", 3, 4)
    steps.step({"a": 5})
    steps.close()
    assert list(read_step_logs(tmp_path)) == [
        Produced("a", 1, "replica-1", "m", 0, 4),
        Produced("b", 2, "replica-1", "m", 7, 2),
        Produced("a", 3, "replica-1", "m", 4, 5),
    ]


def test_a_torn_record_is_not_read(tmp_path: Path) -> None:
    steps = StepLog(tmp_path, "r", "m")
    steps.begin("a", 1, 0)
    for _ in range(2):
        steps.step({"a": 1})
    steps.close()
    (path,) = (tmp_path / "r").glob("*.steps")
    whole = path.read_bytes()
    for cut in range(1, 9):
        path.write_bytes(whole[:-cut])
        assert [found.num_tokens for found in read_step_log(tmp_path / "r")] == [1]


def test_a_full_file_is_followed_by_another_and_the_oldest_go(tmp_path: Path) -> None:
    steps = StepLog(tmp_path, "r", "m", max_file_bytes=100, max_files=2)
    for number in range(40):
        steps.begin(f"request-{number}", 1, 0)
        steps.step({f"request-{number}": 1})
        steps.end(f"request-{number}")
    steps.begin("long", 1, 0)
    for _ in range(60):
        steps.step({"long": 1})
    steps.close()
    assert len(list((tmp_path / "r").glob("*.steps"))) == 2
    # Its beginning has been dropped, so nothing is claimed of it.
    assert [found.request_id for found in read_step_log(tmp_path / "r")] == []


def test_where_nothing_was_ever_written_nothing_was_produced(tmp_path: Path) -> None:
    assert list(read_step_logs(tmp_path / "none")) == []


def test_a_replica_is_dead_when_nobody_can_add_to_its_log(tmp_path: Path) -> None:
    steps = StepLog(tmp_path, "r", "m")
    assert living_replicas(tmp_path) == {"r"}
    assert dead_replicas(tmp_path) == []
    steps.close()
    assert living_replicas(tmp_path) == frozenset()
    assert dead_replicas(tmp_path) == [tmp_path / "r"]
    mark_booked(tmp_path / "r")
    assert dead_replicas(tmp_path) == []
    assert remove_old(tmp_path, max_age_s=3600.0) == 0
    assert remove_old(tmp_path, max_age_s=-1.0) == 1
    assert not (tmp_path / "r").exists()
