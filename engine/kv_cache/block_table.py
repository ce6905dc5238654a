"""A running sequence's blocks."""

from dataclasses import dataclass, field

from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.prefix_chain import PrefixChain


@dataclass(slots=True, eq=False)
class BlockTable:
    """Token i lies in blocks[i // block_size].

    `cached` are the tree's nodes for the first blocks: full, computed, never written again,
    and perhaps read by others. The blocks behind them are this sequence's alone. `tail` is the
    node of the first of those, when its first tokens are offered to others for copying.
    `num_projected_blocks` is how many blocks the sequence is expected to come to, or is
    guaranteed. Blocks before `num_seen` have been copied by whoever mirrors the table.
    """

    prefix: PrefixChain
    num_projected_blocks: int
    is_guaranteed: bool
    blocks: list[int] = field(default_factory=list)
    cached: list[CachedBlock] = field(default_factory=list)
    tail: CachedBlock | None = None
    num_seen: int = 0

    def replace(self, index: int, block: int) -> None:
        """Another block holds the same KV."""
        self.blocks[index] = block
        self.num_seen = min(self.num_seen, index)
