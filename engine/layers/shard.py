"""One rank's share of a model whose layers are split over several processes.

    rank r of n keeps attention heads and MLP rows  [r x total // n, (r + 1) x total // n)

A layer is split twice in the same way: its first projection by outputs (heads, MLP rows), its
second by inputs, so that between the two every rank computes alone on what it keeps. What the
second gives is a part of a sum, and `sum` is the only place where ranks speak to each other:
twice a layer. Everything else (the residual stream, norms, embeddings) is the same on all ranks.

Parts are added in the order of ranks, whatever order they come in and however many tokens a
step has: a token's sum does not depend on its company, and all ranks have it to the last bit.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RankGroup(Protocol):
    """The ranks of one model, each calling from its own place, in the same order."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, by rank; all have the shape and dtype of this one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of `size` shares this is. A model in one piece has no group."""

    rank: int = 0
    size: int = 1
    group: RankGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether what is needed once, such as a bias that is added to a sum, is kept here."""
        return self.rank == 0

    def span(self, total: int, unit: int = 1) -> slice:
        """Which of `total` things of `unit` rows each are kept here, in rows."""
        start, stop = (edge * total // self.size for edge in (self.rank, self.rank + 1))
        return slice(start * unit, stop * unit)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, added in float32 or wider and rounded once."""
        if self.group is None:
            return part
        first, *others = self.group.gather(part)
        total = first.to(torch.promote_types(part.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(part.dtype)


WHOLE = Shard()
