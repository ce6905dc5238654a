"""Chooses which idle block goes first when room is needed.

The scope with the most idle blocks gives one up, its least recently used: under pressure no
scope keeps more than its share, and a tenant that floods the cache pushes out its own blocks.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator

from engine.kv_cache.cached_block import CachedBlock

# A scope is ranked anew when it has lost one in so many of its blocks.
TOLERANCE = 32


class IdleBlocks:
    """Cached blocks that nobody holds, by scope, least recently used first."""

    def __init__(self) -> None:
        self._by_scope: dict[str, OrderedDict[CachedBlock, None]] = {}
        # (-size, scope) records: `_recorded` says which one counts; the scope may have shrunk.
        self._largest: list[tuple[int, str]] = []
        self._recorded: dict[str, int] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[CachedBlock]:
        return (node for nodes in self._by_scope.values() for node in nodes)

    def add(self, cache_scope: str, blocks: Collection[CachedBlock]) -> None:
        """These blocks of one scope have just become idle, the least valuable first."""
        if not blocks:
            return
        nodes = self._by_scope.setdefault(cache_scope, OrderedDict())
        self._num_blocks += len(blocks)
        nodes.update(dict.fromkeys(blocks))
        if len(nodes) > self._recorded.get(cache_scope, 0):
            self._record(cache_scope, len(nodes))

    def remove(self, node: CachedBlock) -> None:
        """The block is wanted again, or gone."""
        nodes = self._by_scope[node.cache_scope]
        del nodes[node]
        self._num_blocks -= 1
        if not nodes:
            del self._by_scope[node.cache_scope], self._recorded[node.cache_scope]

    def next_to_go(self) -> CachedBlock | None:
        """The block that is worth least, or None when there is none. It stays here."""
        while self._largest:
            size, scope = -self._largest[0][0], self._largest[0][1]
            nodes = self._by_scope.get(scope)
            if nodes is not None and size - size // TOLERANCE <= len(nodes) <= size:
                return next(iter(nodes))
            heapq.heappop(self._largest)
            # A scope that has shrunk is put in its new place; other records are out of date.
            if nodes is not None and size == self._recorded[scope]:
                self._record(scope, len(nodes))
        return None

    def _record(self, scope: str, size: int) -> None:
        self._recorded[scope] = size
        heapq.heappush(self._largest, (-size, scope))
        if len(self._largest) > 64 + 4 * len(self._recorded):
            self._largest = [(-recorded, name) for name, recorded in self._recorded.items()]
            heapq.heapify(self._largest)
