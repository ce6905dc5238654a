"""Chooses which idle block goes first when room is needed.

The scope with the most idle blocks gives one up, its least recently used: under pressure no
scope keeps more than its share, and a tenant that floods the cache pushes out its own blocks.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from engine.kv_cache.cached_block import CachedBlock


class IdleBlocks:
    """Cached blocks that nobody holds, by scope, least recently used first."""

    def __init__(self) -> None:
        self._by_scope: dict[str, OrderedDict[CachedBlock, None]] = {}
        # (-size, scope) records, at least one true record per scope and any number of old ones.
        self._largest: list[tuple[int, str]] = []
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[CachedBlock]:
        return (node for nodes in self._by_scope.values() for node in nodes)

    def add(self, cache_scope: str, blocks: Iterable[CachedBlock]) -> None:
        """These blocks of one scope have just become idle, the least valuable first."""
        nodes = self._by_scope.setdefault(cache_scope, OrderedDict())
        size = len(nodes)
        nodes.update(dict.fromkeys(blocks))
        if nodes:
            self._num_blocks += len(nodes) - size
            self._note_size(cache_scope, len(nodes))
        else:
            del self._by_scope[cache_scope]

    def remove(self, node: CachedBlock) -> None:
        """The block is wanted again, or gone."""
        nodes = self._by_scope[node.cache_scope]
        del nodes[node]
        self._num_blocks -= 1
        if nodes:
            self._note_size(node.cache_scope, len(nodes))
        else:
            del self._by_scope[node.cache_scope]

    def next_to_go(self) -> CachedBlock | None:
        """The block that is worth least, or None when there is none. It stays here."""
        while self._largest:
            size, scope = self._largest[0]
            nodes = self._by_scope.get(scope, ())
            if nodes and len(nodes) == -size:
                return next(iter(nodes))
            heapq.heappop(self._largest)
        return None

    def _note_size(self, scope: str, size: int) -> None:
        heapq.heappush(self._largest, (-size, scope))
        if len(self._largest) > 64 + 4 * self._num_blocks:
            self._largest = [(-len(nodes), name) for name, nodes in self._by_scope.items()]
            heapq.heapify(self._largest)
