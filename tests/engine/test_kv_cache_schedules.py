"""Any order of joining, computing, leaving and coming back: everybody reads its own KV."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.interface.prefix_keys import child_key
from tests.engine.any_schedule import weak_child_key
from tests.engine.kv_books import Books, Reader

# Beginnings of three streams: shared, and parted, all the time.
STREAMS = [(1,) * 16, (1,) * 6 + (2,) * 10, (1, 1, 2, 1) * 4]
MAX_READERS = 5


class Schedule:
    """Sequences of a small family on a small cache, with steps that overlap decisions."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int, key_bits: int
    ) -> None:
        key = child_key if key_bits == 128 else weak_child_key(key_bits)
        self.books = Books(num_blocks, block_size, num_host_blocks, key)
        self.seen: Counter[str] = Counter()

    def join(self, prompt: tuple[int, ...], scope: str, surplus: int) -> None:
        """With a surplus it is expected to grow by that; with a large one it is guaranteed."""
        if len(self.books.readers) == MAX_READERS:
            return
        expected = max(1, len(prompt) + surplus)
        is_guaranteed = surplus > 4 and self.books.cache.can_guarantee(expected)
        reader = self.books.open(prompt, scope, expected=expected, is_guaranteed=is_guaranteed)
        self.books.check()
        self.seen["hits"] += reader.num_attached > 0
        self.seen["partial hits"] += reader.num_attached % self.books.block_size > 0
        self.seen["guarantees"] += is_guaranteed

    def step(self, counts: list[int], *, is_overlapped: bool) -> None:
        """Compute so many tokens of each; those who owe none say a word instead."""
        books = self.books
        for reader, count in zip(books.readers, counts, strict=False):
            if reader.num_computed == len(reader.token_ids) and not self._is_full(reader):
                reader.token_ids.append(1 + count % 2)
            books.attach(reader)
            wanted = min(count, len(reader.token_ids) - reader.num_scheduled)
            found = books.decide(reader, wanted) if wanted else 0
            assert found == wanted or not books.cache.num_free_blocks, "a free block was refused"
        books.start()
        books.finish(num_left=int(is_overlapped))
        books.check()

    def leave(self, index: int, *, is_preempted: bool) -> None:
        """One leaves; who is preempted comes back at once, or never."""
        if not self.books.readers:
            return
        reader = self.books.readers[index % len(self.books.readers)]
        self.books.close(reader, is_preempted=is_preempted)
        self.books.check()
        if is_preempted and index % 2:
            self.join(tuple(reader.token_ids), reader.scope, 2)
        elif is_preempted:
            self.books.give_up(reader)
            self.books.check()

    def end(self) -> None:
        """Everybody leaves, and nothing is held any more."""
        self.books.start()
        self.books.finish()
        for reader in list(self.books.readers):
            self.books.close(reader)
        self.books.check()
        assert self.books.cache.num_free_blocks == self.books.num_blocks
        self.seen += self.books.seen

    def _is_full(self, reader: Reader) -> bool:
        most = reader.table.num_projected_blocks * self.books.block_size
        return reader.table.is_guaranteed and len(reader.token_ids) >= most


class KVCacheMachine(RuleBasedStateMachine):
    """The same, one rule after another, so that a bad schedule can be made short."""

    key_bits = 128

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        num_host_blocks=st.sampled_from([0, 2, 6]),
    )
    def begin(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.schedule = Schedule(num_blocks, block_size, num_host_blocks, self.key_bits)

    @precondition(lambda self: len(self.schedule.books.readers) < MAX_READERS)
    @rule(
        stream=st.sampled_from(STREAMS),
        length=st.integers(1, 16),
        scope=st.sampled_from(["a", "a", "b"]),
        surplus=st.integers(-4, 8),
    )
    def join(self, stream: tuple[int, ...], length: int, scope: str, surplus: int) -> None:
        self.schedule.join(stream[:length], scope, surplus)

    @rule(
        counts=st.lists(st.integers(0, 16), min_size=MAX_READERS, max_size=MAX_READERS),
        is_overlapped=st.booleans(),
    )
    def step(self, counts: list[int], is_overlapped: bool) -> None:
        self.schedule.step(counts, is_overlapped=is_overlapped)

    @precondition(lambda self: self.schedule.books.readers)
    @rule(index=st.integers(0, MAX_READERS - 1), is_preempted=st.booleans())
    def leave(self, index: int, is_preempted: bool) -> None:
        self.schedule.leave(index, is_preempted=is_preempted)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.end()


@pytest.mark.parametrize("key_bits", [128, 1])
def test_in_any_order_of_events_everybody_reads_its_own_kv(key_bits: int) -> None:
    machine = type("Machine", (KVCacheMachine,), {"key_bits": key_bits})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("key_bits", [128, 8, 1])
def test_in_long_random_schedules_everybody_reads_its_own_kv(key_bits: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = Random(seed)
        schedule = Schedule(rng.randint(3, 12), rng.randint(1, 4), rng.choice([0, 2, 6]), key_bits)
        for _ in range(60):
            event = rng.random()
            if event < 0.3:
                prompt = rng.choice(STREAMS)[: rng.randint(1, 16)]
                schedule.join(prompt, rng.choice("aab"), rng.randint(-4, 8))
            elif event < 0.75:
                counts = [rng.choice([0, 1, 3, 16]) for _ in range(MAX_READERS)]
                schedule.step(counts, is_overlapped=rng.random() < 0.5)
            else:
                schedule.leave(rng.randrange(MAX_READERS), is_preempted=rng.random() < 0.4)
        schedule.end()
        seen += schedule.seen
    assert all(seen[what] > 40 for what in ("hits", "partial hits", "guarantees")), seen
    assert all(seen[kind] > 10 for kind in ("copy", "offload", "load")), seen
