"""A follower hears each delta once and in order, whatever the feed or Redis lost."""

import secrets
from typing import cast

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from control.streams.connection import connect_async
from control.streams.follower import MAX_BUFFERED_DELTAS, Follower, FollowerLag, Subscription
from control.streams.frames import pack_frames
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


class Flaky:
    """The real client, but the first read of a log fails."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._has_failed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    async def get(self, name: str) -> object:
        if not self._has_failed:
            self._has_failed = True
            raise RedisConnectionError("planted")
        return await self._client.get(name)


async def test_a_redis_that_fails_while_a_gap_is_filled_deafens_nobody(redis_url: str) -> None:
    client = connect_async(redis_url)
    keys = ModelKeys(f"m-{secrets.token_hex(4)}")
    follower = Follower(cast("redis.asyncio.Redis", Flaky(client)), f"f-{secrets.token_hex(4)}")
    await client.set(keys.log("r"), pack_frames([delta(0), delta(1)]))
    async with follower.subscribe(keys.model, "r") as subscription:
        await client.xadd(keys.feed(follower.follower_id), {"d": pack_frames([delta(1)])})
        first, second = await subscription.next(10), await subscription.next(10)
        await client.xadd(keys.feed(follower.follower_id), {"d": b"\0\0\0\x09torn"})
        await client.xadd(keys.feed(follower.follower_id), {"d": pack_frames([delta(2)])})
        third = await subscription.next(10)
    assert [d.serial if d else None for d in (first, second, third)] == [0, 1, 2]
    await follower.close()
    await client.aclose()
