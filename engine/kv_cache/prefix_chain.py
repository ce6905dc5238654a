"""A sequence's tokens and the chained keys of its full blocks, computed once each."""

from collections.abc import Callable, Sequence

from engine.interface.prefix_keys import child_key, root_key

ChildKey = Callable[[bytes, Sequence[int]], bytes]


class PrefixChain:
    """Names the beginnings of `token_ids`, a list that its owner goes on appending to."""

    def __init__(
        self,
        cache_scope: str,
        token_ids: list[int],
        block_size: int,
        child_key: ChildKey = child_key,
    ) -> None:
        self.cache_scope = cache_scope
        self.token_ids = token_ids
        self._block_size = block_size
        self._child_key = child_key
        self._root = root_key(cache_scope)
        self._keys: list[bytes] = []
        if token_ids:
            self._extend_to(len(token_ids) // block_size)

    def key(self, index: int) -> bytes:
        """The key of the full block `index`, whose tokens must be known."""
        if index >= len(self._keys):
            self._extend_to(index + 1)
        return self._keys[index]

    def tokens(self, index: int) -> tuple[int, ...]:
        """The tokens of the block `index`, as far as they are known."""
        start = index * self._block_size
        return tuple(self.token_ids[start : start + self._block_size])

    def partial_key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The key of some first tokens of block `index`, after the full blocks before it."""
        self._extend_to(index)
        return self._child_key(self._keys[index - 1] if index else self._root, token_ids)

    def _extend_to(self, count: int) -> None:
        while len(self._keys) < count:
            start = len(self._keys) * self._block_size
            block = self.token_ids[start : start + self._block_size]
            assert len(block) == self._block_size, "a block with unknown tokens has no key"
            self._keys.append(self._child_key(self._keys[-1] if self._keys else self._root, block))
