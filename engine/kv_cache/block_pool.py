"""Owns the fixed blocks of the KV cache.

A block is a number; what lies in it is the runner's affair. It is blank (worth nothing), held
by at least one block table, or idle: held by nobody, but its KV may still be wanted, so it is
made blank only when room is needed. Nothing here touches a tensor.
"""

from collections import deque
from collections.abc import Iterable

_BLANK = -1
_IDLE = 0


class BlockPool:
    """Counts the holders of blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a block pool needs at least 1.")
        self._num_holders = [_BLANK] * num_blocks
        # Oldest blanked first: a block rests as long as possible before it is written again.
        self._blank = deque(range(num_blocks))
        self._num_held = 0

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return len(self._num_holders)

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder; the others are free for the taking."""
        return self._num_held

    def num_holders(self, block: int) -> int:
        """Block tables that name this block which is not blank."""
        assert self._num_holders[block] != _BLANK, f"block {block} is blank"
        return self._num_holders[block]

    @property
    def num_blank(self) -> int:
        """Blocks with nothing worth keeping in them."""
        return len(self._blank)

    def take(self, count: int) -> list[int]:
        """So many blank blocks, now with one holder each; fewer when there are no more."""
        blocks = [self._blank.popleft() for _ in range(min(count, len(self._blank)))]
        for block in blocks:
            self._num_holders[block] = 1
        self._num_held += len(blocks)
        return blocks

    def hold(self, block: int) -> None:
        """Add a holder to a block that is held or idle."""
        assert self._num_holders[block] != _BLANK, f"block {block} is blank and worth nothing"
        self._num_held += self._num_holders[block] == _IDLE
        self._num_holders[block] += 1

    def release(self, block: int) -> bool:
        """Take one holder away; True when it was the last, and the block is idle now."""
        return bool(self.release_all((block,)))

    def release_all(self, blocks: Iterable[int]) -> list[int]:
        """Take one holder of each away; returns those that are idle now."""
        num_holders, idle = self._num_holders, []
        for block in blocks:
            assert num_holders[block] > _IDLE, f"block {block} is released without a holder"
            num_holders[block] -= 1
            if num_holders[block] == _IDLE:
                idle.append(block)
        self._num_held -= len(idle)
        return idle

    def blank(self, block: int) -> None:
        """Give up what an idle block holds."""
        assert self._num_holders[block] == _IDLE, f"block {block} is not idle"
        self._num_holders[block] = _BLANK
        self._blank.append(block)

    def check(self, held: Iterable[int], idle: Iterable[int]) -> None:
        """Every block is blank, idle, or held exactly as often as `held` names it."""
        expected = [_BLANK] * self.num_blocks
        for block in idle:
            assert expected[block] == _BLANK, f"block {block} is idle twice"
            expected[block] = _IDLE
        for block in held:
            assert expected[block] != _IDLE, f"block {block} is both idle and held"
            expected[block] = max(expected[block], _IDLE) + 1
        assert self._num_holders == expected, "the holders counted differ from the block tables"
        blank = [block for block, count in enumerate(expected) if count == _BLANK]
        assert sorted(self._blank) == blank, "the blank blocks are listed wrongly"
        assert self._num_held == sum(count > _IDLE for count in expected)
