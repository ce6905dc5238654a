"""Produced = delivered + wasted, attempt by attempt, and billed = delivered."""

from control.metering.balance import balance, waste_of_the_dead
from control.metering.settlement import Waste, WasteReason
from control.metering.step_log import Produced


def attempt(number: int, offset: int, num_tokens: int, replica_id: str = "r1") -> Produced:
    return Produced("a", number, replica_id, "m", offset, num_tokens)


def billed(completion_tokens: int) -> dict[str, int]:
    return {"a": completion_tokens}


def test_a_request_of_one_attempt_is_even_when_all_was_delivered_or_wasted() -> None:
    waste = [Waste("a", 1, WasteReason.STOP, "r1", 3)]
    found = balance([attempt(1, 0, 10)], billed(7), waste)
    assert found.is_even
    assert (found.produced, found.delivered, found.billed) == (10, 7, 7)
    assert found.wasted == {WasteReason.STOP: 3}


def test_each_attempt_delivered_what_lies_between_its_beginning_and_the_next_ones() -> None:
    attempts = [attempt(3, 9, 4, "r2"), attempt(1, 0, 6), attempt(2, 5, 4)]
    waste = [Waste("a", 1, WasteReason.REPLICA_LOST, "r1", 1)]
    found = balance(attempts, billed(13), waste)
    assert found.is_even
    assert (found.produced, found.delivered) == (14, 13)


def test_a_token_too_few_or_too_many_is_named_with_its_attempt() -> None:
    for produced, difference in ((8, 1), (6, -1)):
        found = balance([attempt(1, 0, produced)], billed(7), [])
        assert not found.is_even
        assert [(off.produced.attempt, off.difference) for off in found.off] == [(1, difference)]


def test_what_a_dead_replica_left_is_its_waste() -> None:
    attempts = [attempt(1, 0, 8), attempt(2, 6, 4, "r2")]
    found = balance(attempts, billed(10), [])
    lost = waste_of_the_dead(found)
    assert lost == [Waste("a", 1, WasteReason.REPLICA_LOST, "r1", 2)]
    assert balance(attempts, billed(10), lost).is_even


def test_requests_without_an_ending_or_a_beginning_are_counted_apart() -> None:
    open_one = Produced("open", 1, "r1", "m", 0, 5)
    found = balance([open_one, attempt(2, 4, 3)], billed(7), [])
    assert (found.num_open, found.untold, found.num_requests) == (1, ["a"], 0)
    assert found.is_even


def test_billed_tokens_that_no_log_tells_of_are_named() -> None:
    assert balance([], billed(7), []).untold == ["a"]
    assert balance([], billed(0), []).untold == []
