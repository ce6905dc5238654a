"""Owns the fixed blocks of the KV cache.

A block is a number; what lies in it is the runner's affair. Every block is either free or
held, and a held one counts its holders, so that several sequences may read one block.
Nothing here touches a tensor.
"""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1 and takes them back when their last holder leaves."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a block pool needs at least 1.")
        self._ref_counts = [0] * num_blocks
        # Oldest freed first: a block rests as long as possible before it is written again.
        self._free = deque(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        """All blocks, free and held."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks with one holder each, or None (and take none) if too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these held blocks."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free and cannot be shared"
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block; a block without holders is free at once."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check(self, holders: Iterable[int]) -> None:
        """A block is free once or held exactly as often as `holders` names it, never both."""
        expected = [0] * self.num_blocks
        for block in holders:
            expected[block] += 1
        assert self._ref_counts == expected, "reference counts differ from the block tables"
        free = sorted(self._free)
        unheld = [block for block, count in enumerate(self._ref_counts) if count == 0]
        assert free == unheld, "the free blocks are not exactly the blocks without holders"
