"""How far a request has come that was accepted and has not ended, as Redis knows it."""

from dataclasses import dataclass
from typing import cast

import redis.asyncio

from control.admission.accepted import Accepted
from control.streams.frames import unpack_frames
from control.streams.keys import ModelKeys

MAX_LOOKED_THROUGH = 1000


@dataclass(frozen=True, slots=True)
class Progress:
    """`num_tokens` were delivered. `queue_position` is 1 for the one that has waited longest in
    its class; None when it waits no more, or behind so many that nobody counts.
    """

    is_assigned: bool = False
    num_tokens: int = 0
    queue_position: int | None = None

    @property
    def word(self) -> str:
        """Where a request is that has not ended."""
        return "running" if self.is_assigned else "queued"


async def read_progress(client: redis.asyncio.Redis, accepted: Accepted) -> Progress:
    """The request's progress; nothing if it has ended or Redis does not know it."""
    if accepted.has_ended:
        return Progress()
    keys = ModelKeys(accepted.model)
    pipeline = client.pipeline(transaction=False)
    pipeline.hmget(keys.live(accepted.request_id), ["replica", "queue", "entry"])
    pipeline.get(keys.log(accepted.request_id))
    (replica, queue, entry), log = await pipeline.execute()
    num_tokens = sum(len(d.token_ids) for d in unpack_frames(cast("bytes", log or b"")))
    if not entry:
        return Progress(bool(replica), num_tokens)
    before = await client.xrange(queue, max=entry, count=MAX_LOOKED_THROUGH + 1) or []
    position = len(before) if len(before) <= MAX_LOOKED_THROUGH else None
    return Progress(False, num_tokens, position)
