"""Owns the KV cache's books: which sequence holds which blocks, and what it may start from.

Admission counts *projected* use: the most blocks that the running sequences will hold at once
if each ends where it is expected to. A projection can be wrong, so growth may find no block;
whom to stop then is the scheduler's decision. What a sequence leaves behind stays known until its
blocks are needed. A sequence that was stopped finds its own KV like any other prefix.
"""

from collections.abc import Set

from engine.interface.block_move import BlockMove
from engine.kv_cache.block_store import BlockStore
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.prefix_chain import PrefixChain
from engine.kv_cache.projected_peak import Growth

# A block of which less than one part in so many is wanted is not worth a copy.
MIN_SHARE_COPIED = 4


class KVCacheManager:
    """Keeps the block tables of the running sequences. `store` says where the KV lies."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token.")
        self.block_size = block_size
        self.store = BlockStore(num_blocks, num_host_blocks)
        self._tables: set[BlockTable] = set()
        self._num_table_blocks = 0
        self._num_guaranteed_blocks = 0

    @property
    def num_blocks(self) -> int:
        """All blocks there are on the device."""
        return self.store.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; what lies in them gives way to who needs them."""
        return self.store.num_blocks - self.store.num_held

    @property
    def num_shared_blocks(self) -> int:
        """How much larger all tables are than what they hold together."""
        return self._num_table_blocks - self.store.num_held

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits into an empty cache."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def has_room(
        self,
        prefix: PrefixChain,
        num_tokens: int,
        ceiling: int,
        growth: Growth,
        held: Set[int] | None = None,
    ) -> bool:
        """Whether a sequence expected to come to `num_tokens` keeps the projection in bounds.

        Blocks that running sequences hold already and this one can share are not counted twice;
        `held` names them if not all that run are meant.
        """
        own = self.blocks_for(len(prefix.token_ids))
        excess = growth.plus(own, self.blocks_for(num_tokens)).peak - ceiling
        return excess <= 0 or (excess < own and excess <= self._num_held_in_common(prefix, held))

    def can_guarantee(self, num_tokens: int) -> bool:
        """Whether this many tokens fit beside all that is guaranteed already."""
        return self._num_guaranteed_blocks + self.blocks_for(num_tokens) <= self.num_blocks

    def open(self, prefix: PrefixChain, num_tokens: int, *, is_guaranteed: bool) -> BlockTable:
        """An empty table for a sequence expected (or guaranteed) to come to `num_tokens`."""
        table = BlockTable(prefix, self.blocks_for(num_tokens), is_guaranteed)
        self._tables.add(table)
        if is_guaranteed:
            self._num_guaranteed_blocks += table.num_projected_blocks
        return table

    def project(self, table: BlockTable, num_tokens: int) -> None:
        """Correct what the sequence is expected to come to."""
        assert not table.is_guaranteed, "a guarantee is not a guess to be corrected"
        table.num_projected_blocks = self.blocks_for(num_tokens)

    def attach_prefix(self, table: BlockTable, num_tokens: int) -> int:
        """Let a table that covers `num_tokens` computed tokens go on with KV that exists.

        Returns how many tokens have KV now. The last known token is never among them: it has
        to be computed for the next one to be sampled. Takes free blocks, and needs none but
        for KV that lies on the host or in part of a block.
        """
        prefix, size = table.prefix, self.block_size
        limit = len(prefix.token_ids) - 1
        if len(table.cached) * size != num_tokens or len(table.blocks) != len(table.cached):
            return num_tokens
        while num_tokens + size <= limit:
            index = num_tokens // size
            parent = self._last(table)
            node = self.store.tree.find(parent, prefix.key(index), prefix.tokens(index))
            block = self.store.hold(node) if node is not None else None
            if node is None or block is None:
                break
            self._append(table, block)
            table.cached.append(node)
            num_tokens += size
        return num_tokens + self._copy_partial(table, num_tokens, limit)

    def try_grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Let the table cover `num_tokens` tokens. False if blocks ran out: it got the rest."""
        num_missing = self.blocks_for(num_tokens) - len(table.blocks)
        if num_missing <= 0:
            return True
        blocks = self.store.take(num_missing)
        table.blocks += blocks
        self._num_table_blocks += len(blocks)
        return len(blocks) == num_missing

    def grow_each(self, tables: list[BlockTable]) -> list[int]:
        """One more block for each table, where so many can be had; returns them."""
        blocks = self.store.take(len(tables))
        for table, block in zip(tables, blocks, strict=True):
            table.blocks.append(block)
        self._num_table_blocks += len(blocks)
        return blocks

    def record(self, table: BlockTable, num_tokens: int, *, offers_tail: bool = False) -> None:
        """The KV of the first `num_tokens` tokens is computed: full blocks may be shared now.

        With `offers_tail` the tokens behind the last full block may be copied by others.
        """
        size = self.block_size
        self._publish(table, num_tokens // size)
        if offers_tail and num_tokens % size and len(table.cached) == num_tokens // size:
            self._offer_tail(table, num_tokens)

    def close(
        self,
        table: BlockTable,
        num_tokens: int,
        *,
        is_preempted: bool = False,
        is_trusted: bool = True,
    ) -> None:
        """Take the table of a sequence with `num_tokens` computed tokens away.

        Blocks that nobody else holds become idle, or blank if nothing in them can be found.
        Those of a sequence that failed are not to be trusted: nobody will find them again.
        """
        size = self.block_size
        full = len(table.cached)
        # Which blocks are shared decides nothing any more; what the last one holds does.
        if full == num_tokens // size and num_tokens % size:
            self._offer_tail(table, num_tokens)
        self._num_table_blocks -= len(table.blocks)
        if table.is_guaranteed:
            self._num_guaranteed_blocks -= table.num_projected_blocks
        self._tables.remove(table)
        nodes: list[CachedBlock | None] = [*table.cached, table.tail]
        nodes += [None] * (len(table.blocks) - len(nodes))
        idle = self.store.release(
            table.blocks, nodes[: len(table.blocks)], is_preempted=is_preempted
        )
        if not is_trusted:
            for node in idle:
                self.store.forget(node)

    def give_up(self, prefix: PrefixChain) -> None:
        """A sequence that was stopped has ended: what it left is idle like everything else.

        Without this, blocks on the host that nobody comes back for would keep their places.
        """
        tree = self.store.tree
        parent: CachedBlock | None = tree.root(prefix.cache_scope)
        index = 0
        while parent is not None:
            token_ids = prefix.tokens(index)
            for tail in tree.tails(parent, token_ids):
                self.store.give_up(tail)
            is_known = len(token_ids) == self.block_size
            parent = tree.find(parent, prefix.key(index), token_ids) if is_known else None
            if parent is not None:
                self.store.give_up(parent)
            index += 1

    def take_moves(self) -> tuple[BlockMove, ...]:
        """The moves that the books have assumed since the last call, in their order."""
        return self.store.take_moves()

    def check(self) -> None:
        """All the laws of the books; raises AssertionError."""
        tables = self._tables
        held = [block for table in tables for block in table.blocks]
        self.store.check(held)
        for table in tables:
            self._check_table(table)
        assert self._num_table_blocks == len(held)
        guaranteed = [t.num_projected_blocks for t in tables if t.is_guaranteed]
        assert self._num_guaranteed_blocks == sum(guaranteed) <= self.num_blocks

    def _check_table(self, table: BlockTable) -> None:
        assert [node.block for node in table.cached] == table.blocks[: len(table.cached)]
        parent = self.store.tree.root(table.prefix.cache_scope)
        for node in table.cached:
            assert node.parent is parent, "a table's prefix is not a chain"
            assert len(node.token_ids) == self.block_size
            parent = node
        for block in table.blocks[len(table.cached) :]:
            assert self.store.is_alone(block), "a block that is written is shared"
        if table.tail is not None:
            assert table.tail.block == table.blocks[len(table.cached)]
        if table.is_guaranteed:
            assert len(table.blocks) <= table.num_projected_blocks

    def _last(self, table: BlockTable) -> CachedBlock:
        return table.cached[-1] if table.cached else self.store.tree.root(table.prefix.cache_scope)

    def _num_held_in_common(self, prefix: PrefixChain, held: Set[int] | None) -> int:
        parent = self.store.tree.root(prefix.cache_scope)
        count = 0
        for index in range((len(prefix.token_ids) - 1) // self.block_size):
            node = self.store.tree.find(parent, prefix.key(index), prefix.tokens(index))
            if node is None or not self.store.is_held(node):
                break
            if held is not None and node.block not in held:
                break
            count += 1
            parent = node
        return count

    def _append(self, table: BlockTable, block: int) -> None:
        table.blocks.append(block)
        self._num_table_blocks += 1

    def _copy_partial(self, table: BlockTable, num_tokens: int, limit: int) -> int:
        """Begin the next block with the most tokens that some cached block begins with."""
        wanted = tuple(
            table.prefix.token_ids[num_tokens : min(limit, num_tokens + self.block_size)]
        )
        if not wanted:
            return 0
        node, length = self._best_partial(table, wanted)
        if node is None or not length:
            return 0
        is_all = length == len(node.token_ids) < self.block_size
        if length < self.block_size // MIN_SHARE_COPIED and not is_all:
            return 0
        block = self.store.copy(node, is_all_wanted=is_all)
        if block is None:
            return 0
        self._append(table, block)
        return length

    def _best_partial(
        self, table: BlockTable, wanted: tuple[int, ...]
    ) -> tuple[CachedBlock | None, int]:
        parent = self._last(table)
        key = table.prefix.partial_key(len(table.cached), wanted)
        exact = self.store.tree.find(parent, key, wanted)
        if exact is not None:
            return exact, len(wanted)
        similar = self.store.tree.find_similar(parent, wanted)
        return similar, similar.num_common_tokens(wanted) if similar else 0

    def _publish(self, table: BlockTable, num_full: int) -> None:
        """Make the table's first full blocks known, up to one whose name another has taken."""
        tree, prefix, cached = self.store.tree, table.prefix, table.cached
        if table.tail is not None and len(cached) < num_full:
            tree.remove(table.tail)
            table.tail = None
        parent = self._last(table)
        for index in range(len(cached), num_full):
            key, token_ids = prefix.key(index), prefix.tokens(index)
            node = tree.find(parent, key, token_ids)
            if node is None:
                node = tree.insert(parent, key, token_ids, table.blocks[index])
                if node is None:
                    return
            else:
                # Two have computed the same block: one of them is enough.
                table.replace(index, self.store.merge(table.blocks[index], node))
            cached.append(node)
            parent = node

    def _offer_tail(self, table: BlockTable, num_tokens: int) -> None:
        """Make the computed tokens behind the last full block known, in place of fewer."""
        index = len(table.cached)
        token_ids = tuple(table.prefix.token_ids[index * self.block_size : num_tokens])
        if table.tail is not None:
            if table.tail.token_ids == token_ids:
                return
            self.store.tree.remove(table.tail)
        key = table.prefix.partial_key(index, token_ids)
        table.tail = self.store.tree.insert(self._last(table), key, token_ids, table.blocks[index])
