"""Knows where KV lies: in which block, on the device or on the host, or nowhere any more.

    blank ──take──▶ held ──release──▶ idle ──room is needed──▶ host, or forgotten
      ▲                ▲                │                        │
      └──── forget ────┼───── hold ─────┘                        │
                       └──────────────── hold (load) ────────────┘

Every change that has to happen to the KV itself becomes a BlockMove, in order. Who uses a block
and what for is the KV cache manager's affair.
"""

from collections.abc import Iterable, Sequence

from engine.interface.block_move import BlockMove, MoveKind
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.idle_blocks import IdleBlocks
from engine.kv_cache.prefix_tree import PrefixTree
from engine.kv_cache.swap_cost import SwapCost


class BlockStore:
    """The device's blocks, the host's, and the tree of what is known to be in them.

    `recompute_s_per_token` is what computing a token's KV again costs at present; whoever
    measures steps keeps it up to date.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.tree = PrefixTree()
        self.swap_cost = SwapCost()
        self.recompute_s_per_token = 1e-3
        self.num_offloaded = 0
        self.num_loaded = 0
        self._pool = BlockPool(num_blocks)
        self._idle = IdleBlocks()
        self._host = HostTier(num_host_blocks)
        self._moves: list[BlockMove] = []
        self._worth_moving: dict[tuple[bool, int], bool] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks on the device."""
        return self._pool.num_blocks

    @property
    def num_held(self) -> int:
        """Blocks on the device that somebody holds; all others can be had."""
        return self._pool.num_held

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks with nothing in them."""
        return self._host.num_free

    def take(self, count: int) -> list[int]:
        """Blocks to write, at the price of what idle ones hold; fewer when all others are held."""
        while self._pool.num_blank < count:
            node = self._idle.next_to_go()
            if node is None:
                break
            if self._is_worth_moving(node) and self._make_room_on_host(node):
                self._offload(node)
            else:
                self.forget(node)
        return self._pool.take(count)

    def take_one(self) -> int | None:
        """A block to write, or None when all are held."""
        return next(iter(self.take(1)), None)

    def is_held(self, node: CachedBlock) -> bool:
        """Whether somebody holds the block."""
        return node.block is not None and self._pool.num_holders(node.block) > 0

    def is_alone(self, block: int) -> bool:
        """Whether a held block has a single holder."""
        return self._pool.num_holders(block) == 1

    def hold(self, node: CachedBlock) -> int | None:
        """Hold the node's block, fetched from the host if need be; None if there is no room."""
        if node.block is None:
            return self._fetch(node)
        if not self._pool.num_holders(node.block):
            self._idle.remove(node)
            node.is_preempted = False
        self._pool.hold(node.block)
        return node.block

    def copy(self, node: CachedBlock, *, is_all_wanted: bool) -> int | None:
        """A block of one's own that begins with the node's KV; None if there is no room.

        A partial block that is wanted as it is and that nobody holds is not copied: it goes on
        as if it had never been left.
        """
        if node.host_block is not None:
            return self._copy_from_host(node, is_last=is_all_wanted)
        source = _block_of(node)
        is_idle = not self._pool.num_holders(source)
        if is_idle:
            self._idle.remove(node)
        self._pool.hold(source)
        if is_idle and is_all_wanted:
            self.tree.remove(node)
            return source
        # The source is held meanwhile, so that it is not what gives way to its copy.
        destination = self.take_one()
        if self._pool.release(source):
            self._idle.add(node.cache_scope, [node])
        if destination is not None:
            self._moves.append(BlockMove(MoveKind.COPY, source, destination))
        return destination

    def merge(self, mine: int, node: CachedBlock) -> int:
        """Of a block of one's own and a node with the same KV keep one, held; returns which."""
        if node.block is None:
            self._host.take_out(node)
            self._host.leave(node)
            node.block = mine
            node.is_preempted = False
            return mine
        self.hold(node)
        assert self._pool.release(mine), "a block that was written was shared"
        self._pool.blank(mine)
        return node.block

    def release(
        self, blocks: Sequence[int], nodes: Sequence[CachedBlock | None], *, is_preempted: bool
    ) -> list[CachedBlock]:
        """Give up one hold on each block; returns the nodes that nobody holds any more.

        `nodes` says what is known to be in a block, None if nothing is. The last block goes
        first, so that a continuation gives way before what it continues.
        """
        idle = []
        named = dict(zip(reversed(blocks), reversed(nodes), strict=True))
        for block in self._pool.release_all(named):
            node = named[block]
            if node is None:
                self._pool.blank(block)
            else:
                node.is_preempted = is_preempted
                idle.append(node)
        if idle:
            self._idle.add(idle[0].cache_scope, idle)
        return idle

    def forget(self, node: CachedBlock) -> None:
        """Drop a node that nobody holds, and all that continues it."""
        if node.children is not None:
            branches = list(node.children.values())
            for parent in branches:
                branches += (parent.children or {}).values()
            for dropped in reversed(branches):
                self._forget_one(dropped)
        self._forget_one(node)

    def give_up(self, node: CachedBlock) -> None:
        """The stopped sequence that was known to need this KV again needs it no more."""
        if node.is_preempted and node.host_block is not None:
            self._host.take_out(node)
            node.is_preempted = False
            self._host.put_back(node)
        node.is_preempted = False

    def take_moves(self) -> tuple[BlockMove, ...]:
        """The moves that the books have assumed since the last call, in their order."""
        moves, self._moves = tuple(self._moves), []
        self._worth_moving.clear()
        return moves

    def check(self, held: list[int]) -> None:
        """The books agree with each other and with the blocks that tables hold."""
        self.tree.check()
        self._host.check()
        nodes = list(self.tree)
        on_host = [node for node in nodes if node.host_block is not None]
        assert set(on_host) == set(self._host), "the host tier and the tree differ"
        self._pool.check(held, (_block_of(node) for node in self._idle))
        on_device = {node.block: node for node in nodes if node.block is not None}
        assert len(on_device) == len(nodes) - len(on_host), "two prefixes claim one block"
        unheld = set(on_device) - set(held)
        assert {on_device[block] for block in unheld} == set(self._idle), (
            "the idle blocks are not those that nobody holds"
        )

    def _forget_one(self, node: CachedBlock) -> None:
        if node.block is not None:
            self._idle.remove(node)
            self._pool.blank(node.block)
        else:
            self._host.take_out(node)
            self._host.leave(node)
        self.tree.remove(node)

    def _fetch(self, node: CachedBlock) -> int | None:
        """Bring a node back from the host into a block that is held then."""
        self._host.take_out(node)
        block = self.take_one()
        if block is None:
            self._host.put_back(node)
            return None
        self._load(node, block)
        self._host.leave(node)
        node.block = block
        node.is_preempted = False
        return block

    def _copy_from_host(self, node: CachedBlock, *, is_last: bool) -> int | None:
        self._host.take_out(node)
        block = self.take_one()
        if block is None:
            self._host.put_back(node)
            return None
        self._load(node, block)
        if is_last:
            self._host.leave(node)
            self.tree.remove(node)
        else:
            self._host.put_back(node)
        return block

    def _load(self, node: CachedBlock, block: int) -> None:
        assert node.host_block is not None
        self._moves.append(BlockMove(MoveKind.LOAD, node.host_block, block))
        self.num_loaded += 1
        if not node.is_preempted:
            self.swap_cost.observe_idle_hit()

    def _offload(self, node: CachedBlock) -> None:
        """Blank an idle block whose KV goes to the host, where there is room."""
        self._idle.remove(node)
        block = _block_of(node)
        node.block = None
        self._moves.append(BlockMove(MoveKind.OFFLOAD, block, self._host.place(node)))
        self._pool.blank(block)
        self.num_offloaded += 1
        if not node.is_preempted:
            self.swap_cost.observe_idle_eviction()

    def _is_worth_moving(self, node: CachedBlock) -> bool:
        """Whether KV like the node's goes to the host; decided once between two steps.

        A probe is paid for block by block.
        """
        if self._host.num_blocks == 0:
            return False
        kind = (node.is_preempted, len(node.token_ids))
        answer = self._worth_moving.get(kind)
        if answer is None:
            reuse = 1.0 if node.is_preempted else self.swap_cost.idle_reuse
            answer = self.swap_cost.is_offload_cheaper(
                1, kind[1], self.recompute_s_per_token, reuse
            )
            if not self.swap_cost.is_probing:
                self._worth_moving[kind] = answer
        return answer

    def _make_room_on_host(self, node: CachedBlock) -> bool:
        if self._host.num_free:
            return True
        loser = self._host.next_to_go()
        if loser is None or (loser.children is not None and loser in _ancestors(node)):
            return False
        self.forget(loser)
        return True


def _block_of(node: CachedBlock) -> int:
    assert node.block is not None, "the KV of this prefix is not on the device"
    return node.block


def _ancestors(node: CachedBlock) -> Iterable[CachedBlock]:
    while node.parent is not None:
        node = node.parent
        yield node
