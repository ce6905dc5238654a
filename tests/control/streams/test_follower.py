"""A follower hears each delta once and in order, whatever the feed or Redis lost."""

import pytest

from control.streams.follower import MAX_BUFFERED_DELTAS, FollowerLag, Subscription
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta, Usage


def delta(serial: int, *, is_last: bool = False) -> GenerationDelta:
    return GenerationDelta("r", 0, serial, serial, usage=Usage(1, serial) if is_last else None)


async def heard(subscription: Subscription) -> list[int]:
    serials = []
    while (found := await subscription.next(0.01)) is not None:
        serials.append(found.serial)
    return serials


async def test_a_gap_is_noticed_and_filled_from_the_log() -> None:
    subscription = Subscription(ModelKeys("m"), "r")
    assert subscription.put(delta(0))
    assert not subscription.put(delta(2))
    for serial in range(3):
        assert subscription.put(delta(serial), is_from_log=True)
    assert subscription.put(delta(2))
    assert await heard(subscription) == [0, 1, 2]


async def test_an_ending_is_heard_even_after_what_nobody_has_any_more() -> None:
    subscription = Subscription(ModelKeys("m"), "r")
    subscription.put(delta(0))
    assert not subscription.put(delta(5, is_last=True))
    assert subscription.put(delta(5, is_last=True), is_from_log=True)
    assert await heard(subscription) == [0, 5]


async def test_a_consumer_that_stops_reading_is_told_so_after_what_was_kept() -> None:
    subscription = Subscription(ModelKeys("m"), "r")
    for serial in range(MAX_BUFFERED_DELTAS + 1):
        subscription.put(delta(serial))
    assert subscription.is_lagging
    for _ in range(MAX_BUFFERED_DELTAS):
        await subscription.next(0.01)
    with pytest.raises(FollowerLag):
        await subscription.next(0.01)
