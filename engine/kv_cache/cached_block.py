"""A block whose KV can be used again by whoever begins with the same tokens."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False, repr=False)
class CachedBlock:
    """A node in the tree of known prefixes; its parent is the prefix before it.

    `token_ids` are the first tokens of the block, all of them unless the block is the partial
    tail of a sequence. The KV lies in `block` on the device or in `host_block` on the host,
    never in both; a scope's root has neither. `children` is None until there is one, oldest
    first. `is_preempted` says that whoever left the block last had lost its place, and so is
    known to come back for it. It is one mark for all who share the block: a neighbour that takes
    it and leaves again wipes it off, which can cost computing the block again, and nothing else.
    """

    key: bytes
    token_ids: tuple[int, ...]
    cache_scope: str
    parent: "CachedBlock | None"
    block: int | None = None
    host_block: int | None = None
    is_preempted: bool = False
    children: "dict[bytes, CachedBlock] | None" = None

    def num_common_tokens(self, token_ids: tuple[int, ...]) -> int:
        """How many first tokens of the block are these."""
        count = 0
        for mine, theirs in zip(self.token_ids, token_ids, strict=False):
            if mine != theirs:
                break
            count += 1
        return count
