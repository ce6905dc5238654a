"""Ranks as threads of one process, for numbers that need no sockets."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from engine.layers.shard import Shard

WAIT_S = 60

Result = TypeVar("Result")


@dataclass
class Meeting:
    """Where all ranks of one model put their parts."""

    barrier: threading.Barrier
    parts: list[Tensor | None]


@dataclass
class MeetingThread:
    """One thread's RankGroup."""

    meeting: Meeting
    rank: int

    def gather(self, part: Tensor) -> list[Tensor]:
        meeting = self.meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait(WAIT_S)
        parts = [part for part in meeting.parts if part is not None]
        # Nobody goes on, and puts a new part, before everybody has read.
        meeting.barrier.wait(WAIT_S)
        assert len({(p.shape, p.dtype) for p in parts}) == 1
        return parts


def on_ranks(num_ranks: int, compute: Callable[[Shard], Result]) -> list[Result]:
    """What each rank computes, by rank; all at the same time."""
    meeting = Meeting(threading.Barrier(num_ranks), [None] * num_ranks)
    shards = [Shard(rank, num_ranks, MeetingThread(meeting, rank)) for rank in range(num_ranks)]

    def run(shard: Shard) -> Result:
        try:
            return compute(shard)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, shards))
