"""Ranks on one machine that gather tensors over gloo, torch's way of doing so between CPUs.

They find each other through a file in a private folder and speak over loopback only: a
collective trusts whoever takes part in it, so nobody else on the network may.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

LOOPBACK = "127.0.0.1"
_MEETING_LIMIT = timedelta(seconds=60)
# A rank that hangs is noticed by `RankWatch`, long before this.
_COLLECTIVE_LIMIT = timedelta(minutes=30)


class GlooGroup:
    """A RankGroup. It is made when all ranks have come to the meeting place, a new file."""

    def __init__(self, meeting_place: Path, rank: int, size: int) -> None:
        # Named loosely: torch's type stubs do not know how to choose the device.
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(meeting_place), size)
        store.set_timeout(_MEETING_LIMIT)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = _COLLECTIVE_LIMIT
        self._size = size
        self._group = distributed.ProcessGroupGloo(store, rank, size, options)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, by rank. Raises RuntimeError when one is gone."""
        parts = list(torch.empty((self._size, *part.shape), dtype=part.dtype))
        self._group.allgather([parts], [part.contiguous()]).wait()
        return parts
