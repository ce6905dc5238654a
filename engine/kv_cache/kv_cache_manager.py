"""Owns the KV cache's books: who holds which block, what may be used again, what comes next.

Admission counts *projected* use: the most blocks that the running sequences will hold at once
if each ends where it is expected to. A projection can be wrong, so growth may find no block;
whom to stop then is the scheduler's decision. What a sequence leaves behind stays in the prefix
tree until its blocks are needed, and then moves to the host where that is cheaper than computing
it again. A sequence that was stopped finds its own KV like any other prefix.
"""

from collections.abc import Iterable

from engine.interface.block_move import BlockMove, MoveKind
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.idle_blocks import IdleBlocks
from engine.kv_cache.prefix_chain import PrefixChain
from engine.kv_cache.prefix_tree import PrefixTree
from engine.kv_cache.projected_peak import Growth, projected_peak
from engine.kv_cache.swap_cost import SwapCost


class KVCacheManager:
    """Keeps the block tables of the running sequences and the prefix tree they share.

    `recompute_s_per_token` is what computing a token's KV again costs at present; whoever
    measures steps keeps it up to date.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token.")
        self.block_size = block_size
        self.swap_cost = SwapCost()
        self.recompute_s_per_token = 1e-3
        self.num_offloaded_blocks = 0
        self.num_loaded_blocks = 0
        self._pool = BlockPool(num_blocks)
        self._idle = IdleBlocks()
        self._host = HostTier(num_host_blocks)
        self._tree = PrefixTree()
        self._tables: set[BlockTable] = set()
        self._num_table_blocks = 0
        self._num_guaranteed_blocks = 0
        self._moves: list[BlockMove] = []

    @property
    def num_blocks(self) -> int:
        """All blocks there are on the device."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; what lies in them gives way to who needs them."""
        return self._pool.num_blocks - self._pool.num_held

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks with nothing in them."""
        return self._host.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits into an empty cache."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def projected_blocks(self, growth: Growth) -> int:
        """The most blocks that sequences which grow like this will hold at once."""
        return projected_peak(growth.held, growth.missing) - self._num_shared_blocks

    def has_room(self, prefix: PrefixChain, num_tokens: int, ceiling: int, growth: Growth) -> bool:
        """Whether a sequence expected to come to `num_tokens` keeps the projection in bounds.

        Blocks that running sequences hold already and this one can share are not counted twice.
        """
        held = self.blocks_for(len(prefix.token_ids))
        excess = self.projected_blocks(growth.plus(held, self.blocks_for(num_tokens))) - ceiling
        return excess <= 0 or (excess < held and excess <= self._num_held_in_common(prefix))

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
            node = self._tree.find(self._last(table), prefix.key(index), prefix.tokens(index))
            if node is None or not self._hold(node):
                break
            self._append(table, _block_of(node))
            table.cached.append(node)
            num_tokens += size
        return num_tokens + self._copy_partial(table, num_tokens, limit)

    def try_grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Let the table cover `num_tokens` tokens. False if blocks ran out: it got the rest."""
        while len(table.blocks) * self.block_size < num_tokens:
            block = self._try_take()
            if block is None:
                return False
            self._append(table, block)
        return True

    def record(self, table: BlockTable, num_tokens: int, *, offers_tail: bool = False) -> None:
        """The KV of the first `num_tokens` tokens is computed: full blocks may be shared now.

        With `offers_tail` the tokens behind the last full block may be copied by others.
        """
        size = self.block_size
        while (len(table.cached) + 1) * size <= num_tokens:
            if not self._publish_block(table):
                return
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
        # From the last to the first, so that a continuation goes before what it continues.
        idle = []
        for block, node in reversed(list(zip(table.blocks, nodes, strict=False))):
            if not self._pool.release(block):
                continue
            if node is None:
                self._pool.blank(block)
            else:
                node.is_preempted = is_preempted
                idle.append(node)
        self._idle.add(table.prefix.cache_scope, idle)
        if not is_trusted:
            for node in idle:
                self._forget(node)

    def give_up(self, prefix: PrefixChain) -> None:
        """A sequence that was stopped is gone: what it left is needed no more than other idle KV.

        Without this, blocks on the host that nobody comes back for would keep their places.
        """
        size, start = self.block_size, 0
        parent: CachedBlock | None = self._tree.root(prefix.cache_scope)
        while parent is not None:
            children, parent = parent.children.values(), None
            wanted = tuple(prefix.token_ids[start : start + size])
            for node in children:
                if node.token_ids == wanted[: len(node.token_ids)]:
                    self._need_no_longer(node)
                    parent = node if len(node.token_ids) == size else parent
            start += size

    def take_moves(self) -> tuple[BlockMove, ...]:
        """The moves that the books have assumed since the last call, in their order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def check(self) -> None:
        """All the laws of the books; raises AssertionError."""
        tables = self._tables
        self._tree.check()
        self._host.check()
        nodes = list(self._tree)
        on_host = [node for node in nodes if node.host_block is not None]
        assert set(on_host) == set(self._host), "the host tier and the tree differ"
        held = [block for table in tables for block in table.blocks]
        self._pool.check(held, (_block_of(node) for node in self._idle))
        on_device = {node.block: node for node in nodes if node.block is not None}
        assert len(on_device) == len(nodes) - len(on_host), "two prefixes claim one block"
        unheld = set(on_device) - set(held)
        assert {on_device[block] for block in unheld} == set(self._idle), (
            "the idle blocks are not those that nobody holds"
        )
        for table in tables:
            self._check_table(table)
        assert self._num_table_blocks == len(held)
        guaranteed = [t.num_projected_blocks for t in tables if t.is_guaranteed]
        assert self._num_guaranteed_blocks == sum(guaranteed) <= self.num_blocks

    def _check_table(self, table: BlockTable) -> None:
        assert [node.block for node in table.cached] == table.blocks[: len(table.cached)]
        parent = self._tree.root(table.prefix.cache_scope)
        for node in table.cached:
            assert node.parent is parent, "a table's prefix is not a chain"
            assert len(node.token_ids) == self.block_size
            parent = node
        for block in table.blocks[len(table.cached) :]:
            assert self._pool.num_holders(block) == 1, "a block that is written is shared"
        if table.tail is not None:
            assert table.tail.block == table.blocks[len(table.cached)]
        if table.is_guaranteed:
            assert len(table.blocks) <= table.num_projected_blocks

    def _last(self, table: BlockTable) -> CachedBlock:
        return table.cached[-1] if table.cached else self._tree.root(table.prefix.cache_scope)

    def _num_held_in_common(self, prefix: PrefixChain) -> int:
        parent = self._tree.root(prefix.cache_scope)
        count = 0
        for index in range((len(prefix.token_ids) - 1) // self.block_size):
            node = self._tree.find(parent, prefix.key(index), prefix.tokens(index))
            if node is None or node.block is None or not self._pool.num_holders(node.block):
                break
            count += 1
            parent = node
        return count

    @property
    def _num_shared_blocks(self) -> int:
        """How much larger the tables are than what they hold together."""
        return self._num_table_blocks - self._pool.num_held

    def _append(self, table: BlockTable, block: int) -> None:
        table.blocks.append(block)
        self._num_table_blocks += 1

    def _hold(self, node: CachedBlock) -> bool:
        """Add a holder, fetching the block from the host if need be; False if there is no room."""
        if node.block is not None:
            if not self._pool.num_holders(node.block):
                self._idle.remove(node)
                self._note_reuse(node)
            self._pool.hold(node.block)
            return True
        self._host.take_out(node)
        block = self._try_take()
        if block is None:
            self._host.put_back(node)
            return False
        self._load(node, block)
        node.block = block
        self._host.leave(node)
        self._note_reuse(node)
        return True

    def _need_no_longer(self, node: CachedBlock) -> None:
        if node.is_preempted and node.host_block is not None:
            self._host.take_out(node)
            node.is_preempted = False
            self._host.put_back(node)
        node.is_preempted = False

    def _note_reuse(self, node: CachedBlock) -> None:
        node.is_preempted = False

    def _load(self, node: CachedBlock, block: int) -> None:
        assert node.host_block is not None
        self._moves.append(BlockMove(MoveKind.LOAD, node.host_block, block))
        self.num_loaded_blocks += 1
        if not node.is_preempted:
            self.swap_cost.observe_idle_hit()

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
        if node.host_block is not None:
            return length if self._copy_from_host(table, node, is_all=is_all) else 0
        block = _block_of(node)
        if is_all and not self._pool.num_holders(block):
            # Nobody else has it: it goes on here as if it had never been left.
            self._idle.remove(node)
            self._tree.remove(node)
            self._pool.hold(block)
            self._append(table, block)
            return length
        if not self._pool.num_holders(block):
            self._idle.remove(node)
        self._pool.hold(block)
        mine = self._try_take()
        if self._pool.release(block):
            self._idle.add(node.cache_scope, [node])
        if mine is None:
            return 0
        self._moves.append(BlockMove(MoveKind.COPY, block, mine))
        self._append(table, mine)
        return length

    def _best_partial(
        self, table: BlockTable, wanted: tuple[int, ...]
    ) -> tuple[CachedBlock | None, int]:
        parent = self._last(table)
        key = table.prefix.partial_key(len(table.cached), wanted)
        exact = self._tree.find(parent, key, wanted)
        if exact is not None:
            return exact, len(wanted)
        similar = self._tree.find_similar(parent, wanted)
        return similar, similar.num_common_tokens(wanted) if similar else 0

    def _copy_from_host(self, table: BlockTable, node: CachedBlock, *, is_all: bool) -> bool:
        self._host.take_out(node)
        block = self._try_take()
        if block is None:
            self._host.put_back(node)
            return False
        self._load(node, block)
        self._append(table, block)
        if is_all:
            self._tree.remove(node)
            self._host.leave(node)
        else:
            self._host.put_back(node)
        return True

    def _publish_block(self, table: BlockTable) -> bool:
        """Make the table's next full block known; False when its name is taken by another."""
        index = len(table.cached)
        key, token_ids = table.prefix.key(index), table.prefix.tokens(index)
        if table.tail is not None:
            self._tree.remove(table.tail)
            table.tail = None
        parent = self._last(table)
        node = self._tree.find(parent, key, token_ids)
        if node is None:
            node = self._tree.insert(parent, key, token_ids, table.blocks[index])
            if node is None:
                return False
        else:
            self._merge(table, index, node)
        table.cached.append(node)
        return True

    def _merge(self, table: BlockTable, index: int, node: CachedBlock) -> None:
        """Two computed the same block: keep one."""
        mine = table.blocks[index]
        if node.block is None:
            self._host.take_out(node)
            self._host.leave(node)
            node.block = mine
            node.is_preempted = False
            return
        self._hold(node)
        table.replace(index, node.block)
        assert self._pool.release(mine), "a block that was written was shared"
        self._pool.blank(mine)

    def _offer_tail(self, table: BlockTable, num_tokens: int) -> None:
        """Make the computed tokens behind the last full block known, in place of fewer."""
        index = len(table.cached)
        token_ids = tuple(table.prefix.token_ids[index * self.block_size : num_tokens])
        if table.tail is not None:
            if table.tail.token_ids == token_ids:
                return
            self._tree.remove(table.tail)
        key = table.prefix.partial_key(index, token_ids)
        table.tail = self._tree.insert(self._last(table), key, token_ids, table.blocks[index])

    def _try_take(self) -> int | None:
        """A block to write, at the price of what some idle block holds; None if all are held."""
        block = self._pool.try_take()
        if block is None:
            node = self._idle.next_to_go()
            if node is None:
                return None
            self._evict(node)
            block = self._pool.try_take()
        return block

    def _evict(self, node: CachedBlock) -> None:
        """Blank an idle block; what it holds goes to the host, or is forgotten."""
        reuse = 1.0 if node.is_preempted else self.swap_cost.idle_reuse
        num_tokens = len(node.token_ids)
        is_worth_it = self._host.num_blocks > 0 and self.swap_cost.is_offload_cheaper(
            1, num_tokens, self.recompute_s_per_token, reuse
        )
        if not (is_worth_it and self._make_room_on_host(node)):
            self._forget(node)
            return
        self._idle.remove(node)
        block = _block_of(node)
        node.block = None
        self._moves.append(BlockMove(MoveKind.OFFLOAD, block, self._host.place(node)))
        self._pool.blank(block)
        self.num_offloaded_blocks += 1
        if not node.is_preempted:
            self.swap_cost.observe_idle_eviction()

    def _make_room_on_host(self, node: CachedBlock) -> bool:
        if self._host.num_free:
            return True
        loser = self._host.next_to_go()
        if loser is None or loser in _ancestors(node):
            return False
        self._forget(loser)
        return True

    def _forget(self, node: CachedBlock) -> None:
        """Drop a block that nobody holds, and all that continues it."""
        branches = [node]
        for parent in branches:
            branches += parent.children.values()
        for dropped in reversed(branches):
            if dropped.block is not None:
                self._idle.remove(dropped)
                self._pool.blank(dropped.block)
            else:
                self._host.take_out(dropped)
                self._host.leave(dropped)
            self._tree.remove(dropped)


def _block_of(node: CachedBlock) -> int:
    assert node.block is not None, "the KV of this prefix is not on the device"
    return node.block


def _ancestors(node: CachedBlock) -> Iterable[CachedBlock]:
    while node.parent is not None:
        node = node.parent
        yield node
