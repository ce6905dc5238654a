"""A KV cache manager beside what really lies in each slot when its moves are carried out.

The KV of a token is named by its scope and by all tokens up to it, as the real one depends on
all of them. A step is decided, started and finished as in the engine: moves before writes, and
nothing is recorded before it is finished.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from engine.interface.block_move import MoveKind
from engine.interface.prefix_keys import child_key
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_chain import ChildKey, PrefixChain
from engine.kv_cache.projected_peak import Growth

Name = tuple[str, tuple[int, ...]]
Block = list[Name | None]


@dataclass(slots=True, eq=False)
class Reader:
    """A running sequence: `num_scheduled` tokens have KV when the steps decided so far end."""

    table: BlockTable
    scope: str
    token_ids: list[int]
    num_attached: int = 0
    num_scheduled: int = 0
    num_computed: int = 0

    def names(self, end: int) -> list[Name]:
        return [(self.scope, tuple(self.token_ids[: i + 1])) for i in range(end)]


@dataclass(slots=True)
class Books:
    """The manager under test and the model of its blocks."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    child_key: ChildKey = child_key
    cache: KVCacheManager = field(init=False)
    readers: list[Reader] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    _device: list[Block] = field(init=False)
    _host: list[Block] = field(init=False)
    decided: dict[Reader, tuple[int, int]] = field(default_factory=dict)
    _in_flight: deque[dict[Reader, tuple[int, int]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(self.num_blocks, self.block_size, self.num_host_blocks)
        self._device = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._host = [[None] * self.block_size for _ in range(self.num_host_blocks)]

    def open(
        self,
        token_ids: tuple[int, ...] | list[int],
        scope: str = "a",
        *,
        expected: int | None = None,
        is_guaranteed: bool = False,
    ) -> Reader:
        """A sequence joins, and finds the KV that it can go on with."""
        known = list(token_ids)
        prefix = PrefixChain(scope, known, self.block_size, self.child_key)
        num_tokens = len(known) if expected is None else expected
        table = self.cache.open(prefix, num_tokens, is_guaranteed=is_guaranteed)
        reader = Reader(table, scope, known)
        self.readers.append(reader)
        self.attach(reader)
        return reader

    def attach(self, reader: Reader) -> None:
        """Go on with KV that exists, as long as no step in flight computes for the sequence."""
        start = reader.num_scheduled
        if start == reader.num_computed:
            end = self.cache.attach_prefix(reader.table, start)
            assert end == start or start < end < len(reader.token_ids), "nothing left to compute"
            reader.num_attached += end - start
            reader.num_scheduled = reader.num_computed = end

    def decide(self, reader: Reader, count: int) -> int:
        """Let the next step compute so many more tokens; returns how many found room."""
        assert reader not in self.decided
        start = reader.num_scheduled
        end = min(start + count, len(reader.token_ids))
        has_room = self.cache.try_grow(reader.table, end)
        reach = len(reader.table.blocks) * self.block_size
        assert has_room == (reach >= end)
        end = min(end, reach)
        if end > start:
            self.decided[reader] = start, end
            reader.num_scheduled = end
        return end - start

    def start(self) -> None:
        """Carry out the moves of the step that was decided, and then its writes."""
        for kind, source, destination in self.cache.take_moves():
            self.seen[kind.value] += 1
            origin = self._host if kind is MoveKind.LOAD else self._device
            target = self._host if kind is MoveKind.OFFLOAD else self._device
            target[destination] = list(origin[source])
        rows = self.decided.items()
        written = [b for r, row in rows for b in set(self._places(r, *row))]
        assert len(written) == len(set(written)), "two write one slot"
        for reader, (start, end) in rows:
            names = reader.names(end)[start:]
            for (block, slot), name in zip(self._places(reader, start, end), names, strict=True):
                self._device[block][slot] = name
        for reader, (_, end) in rows:
            self.judge(reader, end)
        self._in_flight.append(self.decided)
        self.decided = {}

    def finish(self, num_left: int = 0) -> None:
        """Record what the steps in flight computed, but for so many of the latest."""
        while len(self._in_flight) > num_left:
            self._record(self._in_flight.popleft())

    def _record(self, rows: dict[Reader, tuple[int, int]]) -> None:
        for reader, (_, end) in rows.items():
            if reader in self.readers:
                reader.num_computed = end
                offers_tail = end == len(reader.token_ids)
                self.cache.record(reader.table, end, offers_tail=offers_tail)

    def compute(self, reader: Reader, count: int | None = None) -> bool:
        """Decide, start and finish a step for one sequence; False if not all found room."""
        wanted = len(reader.token_ids) - reader.num_scheduled if count is None else count
        num_found = self.decide(reader, wanted)
        self.start()
        self.finish()
        return num_found == wanted

    def close(self, reader: Reader, *, is_preempted: bool = False) -> None:
        """The sequence leaves; a step that was decided for it is not started any more."""
        self.decided.pop(reader, None)
        self.readers.remove(reader)
        self.cache.close(reader.table, reader.num_computed, is_preempted=is_preempted)

    def run(self, token_ids: tuple[int, ...] | list[int], scope: str = "a") -> int:
        """A sequence comes, computes its prompt and leaves; returns how many tokens it found."""
        reader = self.open(token_ids, scope)
        assert self.compute(reader), "there is no room"
        self.close(reader)
        return reader.num_attached

    def give_up(self, reader: Reader) -> None:
        """A sequence that was preempted does not come back."""
        self.cache.give_up(reader.table.prefix)

    def judge(self, reader: Reader, end: int) -> None:
        """The first tokens of the sequence have their own KV in its blocks."""
        found = [self._device[block][slot] for block, slot in self._places(reader, 0, end)]
        assert found == reader.names(end), "a sequence reads KV that is not its own"

    def check(self) -> None:
        """The manager's books, and its counts against a plain recount."""
        cache = self.cache
        cache.check()
        blocks = [block for reader in self.readers for block in reader.table.blocks]
        num_held = len(set(blocks))
        assert cache.num_free_blocks == self.num_blocks - num_held
        sizes = np.array([len(reader.table.blocks) for reader in self.readers], np.int64)
        growth = Growth(sizes, np.zeros_like(sizes), cache.num_shared_blocks)
        assert growth.peak == num_held, "what is shared is counted twice"
        assert 0 <= cache.store.num_free_host_blocks <= self.num_host_blocks

    def _places(self, reader: Reader, start: int, end: int) -> list[tuple[int, int]]:
        blocks, size = reader.table.blocks, self.block_size
        return [(blocks[i // size], i % size) for i in range(start, end)]
