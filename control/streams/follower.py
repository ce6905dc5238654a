"""Follows requests: one reader for all deltas of a process, handed to whoever subscribed.

A gateway or a batch worker is one follower. It says that it is alive (`follower:ID`), reads its
feed of each model, and gives every delta to the subscriptions of its request, however many there
are. A subscription is bounded: a consumer that stops reading gets `FollowerLag`, not our memory.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from weakref import WeakValueDictionary

import redis.asyncio
from redis.exceptions import RedisError

from control.errors import ServiceError
from control.streams.cancellation import is_cancelled
from control.streams.frames import unpack_frames
from control.streams.functions import cancel, follow, invoke_async, leave
from control.streams.keys import ModelKeys, follower_key
from engine.interface.generation_delta import GenerationDelta, Usage

# With the grace that the dispatcher adds, a dead follower's requests go on for 15 s at most.
LEASE_S = 10
RENEW_S = 3
MAX_BUFFERED_DELTAS = 4096
READ_BLOCK_MS = 1000
RETRY_S = 0.2

log = logging.getLogger(__name__)

FeedReply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]


class FollowerLag(ServiceError):
    """The consumer read too slowly, and hears no more."""

    code = "client_too_slow"


class Subscription:
    """The deltas of one request, each exactly once, in order, to its last.

    `num_tokens` is how many output tokens the deltas have come to that were put so far.
    """

    def __init__(self, keys: ModelKeys, request_id: str) -> None:
        self.keys = keys
        self.request_id = request_id
        self.is_lagging = False
        self.num_tokens = 0
        self._num_seen = 0
        self._max_buffered = MAX_BUFFERED_DELTAS
        self._deltas: asyncio.Queue[GenerationDelta] = asyncio.Queue()

    def put(self, delta: GenerationDelta, *, is_from_log: bool = False) -> bool:
        """Take a delta. False if it reveals that an earlier one was missed.

        What even the log has lost is lost for good: an ending from the log is always taken.
        """
        if delta.serial < self._num_seen:
            return True  # Seen already, from the log.
        if delta.serial > self._num_seen and not (is_from_log and delta.is_last):
            return False
        self._num_seen = delta.serial + 1
        self.num_tokens = max(self.num_tokens, delta.offset + len(delta.token_ids))
        if is_from_log:
            # A replay comes at once, and is no more than Redis holds.
            self._max_buffered += 1
        if self._deltas.qsize() >= self._max_buffered:
            self.is_lagging = True
        elif not self.is_lagging:
            self._deltas.put_nowait(delta)
        return True

    def put_lost(self) -> None:
        """End the subscription because nobody knows its request any more."""
        lost = GenerationDelta(
            self.request_id, 0, self._num_seen, 0, usage=Usage(0, 0), error="request_lost"
        )
        self.put(lost)

    async def next(self, timeout_s: float | None = None) -> GenerationDelta | None:
        """The next delta, or None after `timeout_s` of silence. Raises FollowerLag."""
        if self.is_lagging and self._deltas.empty():
            raise FollowerLag("The stream was read too slowly.")
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that meets a delta.
            async with asyncio.timeout(timeout_s):
                return await self._deltas.get()
        except TimeoutError:
            return None


class Follower:
    """One process's ear. `run` it as a task for as long as subscriptions are wanted.

    Requests that it alone follows go on for `lease_s` after it is gone.
    """

    def __init__(
        self, client: redis.asyncio.Redis, follower_id: str, lease_s: int = LEASE_S
    ) -> None:
        self.follower_id = follower_id
        self._client = client
        self._lease_s = lease_s
        self._subscriptions: dict[str, list[Subscription]] = {}
        # Joining and leaving one request take turns, or a leave could undo a later attach.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._missing: set[str] = set()

    @property
    def num_subscriptions(self) -> int:
        """How many subscriptions there are."""
        return sum(map(len, self._subscriptions.values()))

    @asynccontextmanager
    async def subscribe(self, model: str, request_id: str) -> AsyncIterator[Subscription]:
        """Follow a request; subscribe before it is queued so that nothing can be missed."""
        keys = ModelKeys(model)
        reader = self._readers.get(model)
        if reader is None or reader.done():
            self._readers[model] = asyncio.create_task(self._read(keys), name=f"feed {model}")
        subscription = Subscription(keys, request_id)
        self._subscriptions.setdefault(request_id, []).append(subscription)
        try:
            yield subscription
        finally:
            others = self._subscriptions[request_id]
            others.remove(subscription)
            if not others:
                del self._subscriptions[request_id]

    async def attach(self, subscription: Subscription) -> bool:
        """Follow a request that runs already, from its first delta on. False if it is gone."""
        keys, request_id = subscription.keys, subscription.request_id
        async with self._turn(request_id):
            reply = await invoke_async(self._client, follow(keys, request_id, self.follower_id))
        if reply[0] == b"gone":
            return False
        await self._replay(subscription)
        return True

    async def leave(self, model: str, request_id: str, grace_s: int = 0) -> bool:
        """Stop following a request to which nobody here subscribes any more.

        Once it has no other follower it is cancelled, if nobody follows it within `grace_s`.
        False if somebody follows it still.
        """
        async with self._turn(request_id):
            if request_id in self._subscriptions:
                return False
            call = leave(ModelKeys(model), request_id, self.follower_id, grace_s * 1000)
            return bool(await invoke_async(self._client, call) != b"followed")

    async def num_logged(self, model: str, request_id: str) -> int:
        """How many output tokens of the request Redis can say again."""
        log = await self._client.get(ModelKeys(model).log(request_id))
        return sum(len(delta.token_ids) for delta in unpack_frames(cast("bytes", log or b"")))

    async def cancel(self, model: str, request_id: str, error: str = "cancelled") -> None:
        """Ask that the request stop. It ends with the error code within two engine steps."""
        await invoke_async(self._client, cancel(ModelKeys(model), request_id, error))

    async def announce(self) -> None:
        """Say that this follower is alive. Call once before the first request is accepted."""
        await self._client.set(follower_key(self.follower_id), b"1", ex=self._lease_s)

    async def run(self) -> None:
        """Renew the lease and look after lost requests until cancelled."""
        try:
            while not is_cancelled():
                try:
                    await self.announce()
                    await self._end_lost_requests()
                except (RedisError, OSError):
                    pass  # Redis is away: its return is noticed by the next round.
                await asyncio.sleep(RENEW_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop listening; `run` does so at its end."""
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)

    def _turn(self, request_id: str) -> asyncio.Lock:
        turn = self._turns.get(request_id)
        if turn is None:
            turn = self._turns[request_id] = asyncio.Lock()
        return turn

    async def _read(self, keys: ModelKeys) -> None:
        feed, last = keys.feed(self.follower_id), b"0"
        while not is_cancelled():
            try:
                reply = await self._client.xread({feed: last}, count=64, block=READ_BLOCK_MS)
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)
                continue
            for _, entries in cast("FeedReply", reply or []):
                for entry_id, fields in entries:
                    last = entry_id
                    await self._deliver_surely(fields.get(b"d", b""))

    async def _deliver_surely(self, frames: bytes) -> None:
        """Deliver an entry, again if Redis fails midway: what was delivered is not repeated."""
        while not is_cancelled():
            try:
                await self._deliver(frames)
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)
            except ValueError:
                log.exception("an unreadable feed entry is passed over")
                return
            else:
                return

    async def _deliver(self, frames: bytes) -> None:
        for delta in unpack_frames(frames):
            for subscription in tuple(self._subscriptions.get(delta.request_id, ())):
                if not subscription.put(delta):
                    await self._replay(subscription)

    async def _replay(self, subscription: Subscription) -> None:
        log = await self._client.get(subscription.keys.log(subscription.request_id))
        for delta in unpack_frames(cast("bytes", log or b"")):
            subscription.put(delta, is_from_log=True)

    async def _end_lost_requests(self) -> None:
        """End subscriptions whose request Redis no longer knows, seen missing twice in a row."""
        subscriptions = [s for several in self._subscriptions.values() for s in several]
        if not subscriptions:
            self._missing.clear()
            return
        pipeline = self._client.pipeline(transaction=False)
        for subscription in subscriptions:
            pipeline.exists(subscription.keys.live(subscription.request_id))
        found = await pipeline.execute()
        missing = {
            subscription.request_id
            for subscription, exists in zip(subscriptions, found, strict=True)
            if not exists
        }
        for subscription in subscriptions:
            if subscription.request_id in missing & self._missing:
                subscription.put_lost()
        self._missing = missing
