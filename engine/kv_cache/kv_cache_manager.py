"""Which sequence owns which blocks, and how many more each may still come to need.

Admission counts *projected* KV: a sequence joins only when the most it can ever hold fits
beside the most that every running one can. Blocks are still handed out as tokens come, but
they can no longer run out, so nobody ever has to be preempted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool


class SequenceId(NamedTuple):
    """One choice of one request: the engine's name for a sequence."""

    request_id: str
    choice: int


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in order; token i lies in blocks[i // block_size]."""

    num_projected_blocks: int
    blocks: list[int] = field(default_factory=list)


class KVCacheManager:
    """Keeps one block table per running sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token.")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[SequenceId, BlockTable] = {}
        self._num_projected_blocks = 0

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing now, promised or not."""
        return self._pool.num_free

    @property
    def num_projected_free_tokens(self) -> int:
        """Token slots that would be left if every running sequence grew to its maximum."""
        return (self.num_blocks - self._num_projected_blocks) * self.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits into an empty cache."""
        return self._blocks_for(num_tokens) <= self.num_blocks

    def try_admit(self, sequence_id: SequenceId, max_tokens: int) -> bool:
        """Promise the sequence room for `max_tokens` tokens in all, or answer False."""
        assert sequence_id not in self._tables, f"{sequence_id} is admitted twice"
        projected = self._blocks_for(max_tokens)
        if self._num_projected_blocks + projected > self.num_blocks:
            return False
        self._num_projected_blocks += projected
        self._tables[sequence_id] = BlockTable(projected)
        return True

    def allocate(self, sequence_id: SequenceId, num_tokens: int) -> tuple[int, ...]:
        """Let the sequence's table cover its first `num_tokens` tokens; return the table."""
        table = self._tables[sequence_id]
        needed = self._blocks_for(num_tokens)
        assert needed <= table.num_projected_blocks, f"{sequence_id} outgrows its projection"
        fresh = self._pool.try_allocate(max(0, needed - len(table.blocks)))
        assert fresh is not None, "projected blocks ran out"
        table.blocks += fresh
        return tuple(table.blocks)

    def free(self, sequence_id: SequenceId) -> None:
        """Give back the sequence's blocks and its projection."""
        table = self._tables.pop(sequence_id)
        self._num_projected_blocks -= table.num_projected_blocks
        self._pool.release(table.blocks)

    def check(self, running: set[SequenceId]) -> None:
        """Exactly the running sequences have tables, each within a projection that fits."""
        assert set(self._tables) == running, "block tables differ from the running sequences"
        tables = self._tables.values()
        assert all(len(table.blocks) <= table.num_projected_blocks for table in tables)
        assert self._num_projected_blocks == sum(t.num_projected_blocks for t in tables)
        assert self._num_projected_blocks <= self.num_blocks
        self._pool.check(block for table in tables for block in table.blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
