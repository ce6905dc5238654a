"""Blocks of host memory for KV that nobody computes with: preempted and idle, never running.

Idle blocks give way to preempted ones, since those are known to be needed again, and not the
reverse.
"""

from collections import deque
from collections.abc import Iterator

from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.idle_blocks import IdleBlocks


class HostTier:
    """Says which cached block lies in which host block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._idle = IdleBlocks()
        self._preempted: dict[CachedBlock, None] = {}

    def __iter__(self) -> Iterator[CachedBlock]:
        yield from self._idle
        yield from self._preempted

    @property
    def num_free(self) -> int:
        """Host blocks with nothing in them."""
        return len(self._free)

    def next_to_go(self) -> CachedBlock | None:
        """Whom a newcomer displaces from a full tier, or None."""
        return self._idle.next_to_go()

    def place(self, node: CachedBlock) -> int:
        """Give the node one of the free host blocks."""
        node.host_block = self._free.popleft()
        self._add(node)
        return node.host_block

    def take_out(self, node: CachedBlock) -> None:
        """Keep the node's place, but out of everybody's reach until it is returned or left."""
        if node.is_preempted:
            del self._preempted[node]
        else:
            self._idle.remove(node)

    def put_back(self, node: CachedBlock) -> None:
        """Undo `take_out`."""
        self._add(node)

    def leave(self, node: CachedBlock) -> None:
        """Free the place of a node that was taken out."""
        assert node.host_block is not None
        self._free.append(node.host_block)
        node.host_block = None

    def check(self) -> None:
        """Every host block is free or holds one node's KV."""
        used = [node.host_block for node in self]
        assert None not in used, "a node without a host block is listed"
        places = sorted([*self._free, *(block for block in used if block is not None)])
        assert places == list(range(self.num_blocks)), "host blocks are lost or used twice"

    def _add(self, node: CachedBlock) -> None:
        if node.is_preempted:
            self._preempted[node] = None
        else:
            self._idle.add(node.cache_scope, [node])
