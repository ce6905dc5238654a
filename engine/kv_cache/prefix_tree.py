"""Knows which prefixes have KV: a tree of cached blocks under one root per cache scope.

A block is found by its chained key, and believed only when its tokens and its parent are the
right ones too: two prefixes with equal keys would share a name, never KV. Where the KV lies
is the block store's affair, who uses it the KV cache manager's.
"""

from collections.abc import Iterator
from itertools import islice

from engine.interface.prefix_keys import root_key
from engine.kv_cache.cached_block import CachedBlock

# Children looked at for one that begins with the most of some tokens.
MAX_LOOKS = 16


class PrefixTree:
    """All cached blocks, each reachable from its scope's root."""

    def __init__(self) -> None:
        self._roots: dict[str, CachedBlock] = {}
        self._nodes: dict[bytes, CachedBlock] = {}

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._nodes.values())

    def root(self, cache_scope: str) -> CachedBlock:
        """The empty prefix of a scope. It is kept only once something is cached under it."""
        root = self._roots.get(cache_scope)
        return root or CachedBlock(root_key(cache_scope), (), cache_scope, None)

    def find(
        self, parent: CachedBlock, key: bytes, token_ids: tuple[int, ...]
    ) -> CachedBlock | None:
        """The child of `parent` with exactly these tokens."""
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.token_ids != token_ids:
            return None
        return node

    def find_similar(self, parent: CachedBlock, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """Of the newest children of `parent` the one that begins with most of these tokens."""
        newest = islice(reversed((parent.children or {}).values()), MAX_LOOKS)
        alike = [node for node in newest if node.token_ids[0] == token_ids[0]]
        return max(alike, key=lambda node: node.num_common_tokens(token_ids), default=None)

    def tails(self, parent: CachedBlock, token_ids: tuple[int, ...]) -> list[CachedBlock]:
        """Of the newest children of `parent` those that hold fewer tokens, and only these."""
        newest = islice(reversed((parent.children or {}).values()), MAX_LOOKS)
        return [
            node
            for node in newest
            if len(node.token_ids) < len(token_ids)
            and node.token_ids == token_ids[: len(node.token_ids)]
        ]

    def insert(
        self, parent: CachedBlock, key: bytes, token_ids: tuple[int, ...], block: int
    ) -> CachedBlock | None:
        """A new child of `parent`, or None when its key is taken: then it stays unknown."""
        if key in self._nodes:
            return None
        if parent.children is None:
            parent.children = {}
            if parent.parent is None:
                self._roots[parent.cache_scope] = parent
        node = CachedBlock(key, token_ids, parent.cache_scope, parent, block)
        self._nodes[key] = parent.children[key] = node
        return node

    def remove(self, node: CachedBlock) -> None:
        """Forget a block without children."""
        assert not node.children, "a block whose continuations are cached is forgotten"
        parent = node.parent
        assert parent is not None, "a root is not a block"
        assert parent.children is not None
        del self._nodes[node.key]
        del parent.children[node.key]
        if not parent.children:
            parent.children = None
            if parent.parent is None:
                del self._roots[parent.cache_scope]

    def check(self) -> None:
        """Every block hangs, by way of its parents, on its scope's root."""
        num_reached = 0
        for scope, root in self._roots.items():
            assert root.children, "a scope without cached blocks is kept"
            branches = [root]
            while branches:
                parent = branches.pop()
                for key, node in (parent.children or {}).items():
                    assert node.parent is parent
                    assert node.cache_scope == scope
                    assert self._nodes[key] is node
                    assert (node.block is None) != (node.host_block is None)
                    num_reached += 1
                    branches.append(node)
        assert num_reached == len(self._nodes), "a cached block cannot be reached"
