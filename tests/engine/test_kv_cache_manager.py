from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from engine.interface.block_move import BlockMove, MoveKind
from engine.interface.prefix_keys import root_key
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_chain import PrefixChain
from engine.kv_cache.projected_peak import Growth
from tests.engine.kv_books import Books, Reader

LONG = tuple(range(1, 15))  # 14 tokens: three full blocks of four, and a half
NOBODY = Growth(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)


def growth_of(*readers: Reader) -> Growth:
    """What the readers hold, expecting no more."""
    sizes = np.array([len(reader.table.blocks) for reader in readers], np.int64)
    num_held = len({block for reader in readers for block in reader.table.blocks})
    return Growth(sizes, np.zeros_like(sizes), int(sizes.sum()) - num_held)


def stream(seed: int, num_tokens: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(1, 1000) for _ in range(num_tokens))


def cached_share(books: Books, conversations: list[tuple[int, ...]], scope: str) -> float:
    """How much of these prompts is found again."""
    found = 0
    for token_ids in conversations:
        reader = books.open(token_ids, scope)
        found += reader.num_attached
        books.close(reader)
    books.start()
    return found / sum(map(len, conversations))


# --- growing and leaving


def test_blocks_come_as_tokens_do_and_leave_all_at_once() -> None:
    books = Books(4, 4)
    reader = books.open((1,) * 12)
    assert books.cache.num_free_blocks == 4
    books.compute(reader, 4)
    assert len(reader.table.blocks) == 1
    books.compute(reader, 1)
    assert len(reader.table.blocks) == 2
    first = list(reader.table.blocks)
    books.compute(reader, 3)
    assert reader.table.blocks == first
    assert books.cache.num_free_blocks == 2
    books.close(reader)
    assert books.cache.num_free_blocks == 4
    books.check()


def test_growth_says_when_blocks_run_out_and_keeps_what_it_got() -> None:
    books = Books(4, 4)
    other = books.open((9,) * 5)
    books.compute(other)
    reader = books.open(LONG)
    assert not books.cache.try_grow(reader.table, 14)
    assert len(reader.table.blocks) == 2
    assert books.cache.num_free_blocks == 0
    books.close(other)
    assert books.cache.try_grow(reader.table, 14)
    books.check()


def test_a_sequence_larger_than_the_cache_can_never_fit() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    assert cache.can_ever_fit(16)
    assert not cache.can_ever_fit(17)


def test_blocks_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        KVCacheManager(num_blocks=4, block_size=0)


# --- what is projected and guaranteed


def test_blocks_that_a_newcomer_can_share_are_not_counted_twice() -> None:
    books = Books(8, 4)
    running = books.open((*LONG, 99))
    books.compute(running)
    twin = PrefixChain("a", [*LONG, 7, 7], 4)
    stranger = PrefixChain("b", [*LONG, 7, 7], 4)
    growth = growth_of(running)
    # Four are held; the twin needs four of which three are there already.
    assert books.cache.has_room(twin, 16, 5, growth)
    assert not books.cache.has_room(twin, 16, 4, growth)
    assert not books.cache.has_room(stranger, 16, 7, growth)
    assert books.cache.has_room(stranger, 16, 8, growth)


def test_idle_blocks_are_room_and_no_debt() -> None:
    books = Books(4, 4)
    books.run((*LONG, 99))
    assert books.cache.has_room(PrefixChain("b", [1] * 16, 4), 16, 4, NOBODY)


def test_shared_blocks_are_projected_once() -> None:
    books = Books(16, 4)
    readers = []
    for i in range(4):
        readers.append(books.open((*LONG[:12], 50 + i)))
        books.compute(readers[-1])
    assert growth_of(*readers).peak == 3 + 4
    assert books.cache.num_shared_blocks == 3 * 3


def test_guarantees_never_exceed_the_cache() -> None:
    books = Books(8, 4)
    first = books.open(LONG, expected=20, is_guaranteed=True)
    assert books.cache.can_guarantee(12)
    assert not books.cache.can_guarantee(13)
    with pytest.raises(AssertionError, match="guarantee"):
        books.cache.project(first.table, 24)
    books.close(first)
    assert books.cache.can_guarantee(32)
    books.check()


# --- prefixes


def test_a_prompt_comes_back_to_its_own_kv_but_for_its_last_token() -> None:
    books = Books(8, 4)
    assert books.run(LONG) == 0
    assert books.run(LONG) == 13
    assert books.run(LONG[:12]) == 11
    assert books.run((*LONG, 5, 5, 5)) == 14
    books.check()


def test_readers_of_one_prefix_hold_its_blocks_together() -> None:
    books = Books(8, 4)
    first = books.open((*LONG[:12], 1))
    books.compute(first)
    second = books.open((*LONG[:12], 2))
    books.compute(second)
    assert first.table.blocks[:3] == second.table.blocks[:3]
    assert first.table.blocks[3] != second.table.blocks[3]
    books.close(first)
    assert books.cache.num_free_blocks == 4
    books.judge(second, 13)
    books.close(second)
    assert books.cache.num_free_blocks == 8


def test_a_prefix_that_parts_within_a_block_is_copied_up_to_there() -> None:
    books = Books(8, 4)
    books.run((*LONG[:8], 1, 2, 3, 4, 5))
    reader = books.open((*LONG[:8], 1, 2, 9, 9, 9))
    assert reader.num_attached == 10
    books.compute(reader)
    assert books.seen[MoveKind.COPY.value] == 1
    assert books.run((*LONG[:8], 1, 2, 3, 4, 5)) == 12


def test_a_tail_that_its_owner_still_writes_is_copied() -> None:
    books = Books(8, 4)
    owner = books.open(LONG)
    books.compute(owner)
    fork = books.open(LONG)
    assert fork.num_attached == 13
    owner.token_ids += [20, 21]
    fork.token_ids += [30, 31]
    books.compute(owner)
    books.compute(fork)
    assert owner.table.blocks[:3] == fork.table.blocks[:3]
    assert owner.table.blocks[3] != fork.table.blocks[3]
    books.judge(owner, 16)
    books.judge(fork, 16)
    books.check()


def test_a_tail_that_nobody_else_has_is_gone_on_with_in_place() -> None:
    books = Books(4, 4)
    reader = books.open(LONG)
    books.compute(reader)
    block = reader.table.blocks[3]
    books.close(reader)
    again = books.open((*LONG, 15, 16))
    assert again.num_attached == 14
    assert again.table.blocks[3] == block
    books.compute(again)
    assert not books.seen[MoveKind.COPY.value]
    books.check()


def test_two_who_computed_the_same_block_keep_one() -> None:
    books = Books(8, 4)
    twins = [books.open(LONG[:9]) for _ in range(2)]
    for twin in twins:
        books.decide(twin, 9)
    assert books.cache.num_free_blocks == 2
    books.start()
    books.finish()
    assert twins[0].table.blocks[:2] == twins[1].table.blocks[:2]
    assert books.cache.num_free_blocks == 4
    for twin in twins:
        books.judge(twin, 9)
    books.check()


def test_nothing_is_ever_found_in_another_scope() -> None:
    books = Books(16, 4)
    books.run(LONG, "a")
    assert books.run(LONG, "b") == 0
    assert books.run(LONG, "a") == 13


def test_equal_keys_of_different_prefixes_are_no_hit() -> None:
    def same_for_all(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return root_key("")

    books = Books(8, 4, child_key=same_for_all)
    assert books.run(LONG) == 0
    # Its first block has the only name there is.
    assert books.run(LONG) == 4
    assert books.run((5,) * 14) == 0
    assert books.run(LONG, "b") == 0
    assert books.run(LONG) == 4
    books.check()


def test_a_prefix_is_forgotten_with_all_that_continues_it() -> None:
    books = Books(4, 4)
    books.run((*LONG[:12], 1, 2, 3, 4))
    parent = books.open(LONG[:5])
    assert books.compute(parent)
    books.close(parent)
    # Three blocks are wanted: the least recently used go first, the ends before the beginning.
    assert books.run((7,) * 12) == 0
    assert books.run(LONG[:8]) == 4
    assert books.run((8,) * 16) == 0
    assert books.run(LONG) == 0
    books.check()


def test_an_empty_cache_remembers_no_scope() -> None:
    books = Books(2, 4)
    for i in range(20):
        books.run((i,) * 8, f"scope-{i}")
        books.check()
    # The tree's own law: no root without blocks, and two blocks have at most two roots.
    assert sum(books.run((i,) * 8, f"scope-{i}") > 0 for i in range(20)) <= 1


# --- the host


def test_what_must_go_from_the_device_comes_back_from_the_host() -> None:
    books = Books(4, 4, num_host_blocks=8)
    books.run(LONG)
    books.run((9,) * 16)
    assert books.seen[MoveKind.OFFLOAD.value] == 4
    assert books.cache.store.num_offloaded == 4
    assert books.run(LONG) == 13
    assert books.cache.store.num_loaded == books.seen[MoveKind.LOAD.value] == 4
    books.check()


def test_moves_are_handed_out_once_and_in_their_order() -> None:
    books = Books(2, 4, num_host_blocks=4)
    books.run((1,) * 8)
    reader = books.open((2,) * 8)
    books.cache.try_grow(reader.table, 8)
    moves = books.cache.take_moves()
    assert [move.kind for move in moves] == [MoveKind.OFFLOAD] * 2
    assert sorted(move.source for move in moves) == sorted(reader.table.blocks)
    assert moves == (BlockMove(MoveKind.OFFLOAD, moves[0].source, 0), moves[1])
    assert books.cache.take_moves() == ()


def test_nothing_is_offloaded_when_computing_it_again_is_cheaper() -> None:
    books = Books(4, 4, num_host_blocks=8)
    for _ in range(8):
        books.cache.store.swap_cost.observe_moves(1, 1.0)
    books.cache.store.recompute_s_per_token = 1e-6
    books.run(LONG)
    books.run((9,) * 16)
    assert books.run(LONG) == 0
    assert not books.cache.store.num_offloaded


def test_idle_blocks_on_the_host_give_way_to_preempted_ones_and_not_the_reverse() -> None:
    books = Books(4, 4, num_host_blocks=4)
    books.run(LONG, "idle")
    victim = books.open(LONG, "preempted")
    books.compute(victim)
    books.close(victim, is_preempted=True)
    other = books.open((9,) * 16)
    books.compute(other)
    books.close(other)
    books.run((8,) * 16)
    assert books.run(LONG, "preempted") == 13
    books.check()


def test_what_nobody_comes_back_for_gives_way_like_all_that_is_idle() -> None:
    books = Books(4, 4, num_host_blocks=4)
    victim = books.open((*LONG, 15, 16))
    books.compute(victim, 15)
    books.close(victim, is_preempted=True)
    books.run((9,) * 16)
    assert books.cache.store.num_free_host_blocks == 0
    books.run((8,) * 16)
    assert books.cache.store.num_offloaded == 4, "what is needed again is not displaced"
    books.give_up(victim)
    books.check()
    for token_id in (7, 6, 5):
        books.run((token_id,) * 16)
    assert books.cache.store.num_offloaded > 4 + 4
    assert books.run(victim.token_ids) == 0
    books.check()


def test_a_preempted_sequence_finds_all_that_it_had_computed() -> None:
    books = Books(4, 4, num_host_blocks=4)
    victim = books.open((*LONG, 15, 16))
    books.compute(victim, 15)
    books.close(victim, is_preempted=True)
    books.run((9,) * 16)
    again = books.open(victim.token_ids)
    assert again.num_attached == 15
    assert books.compute(again)
    books.check()


# --- scopes under pressure


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_a_scope_that_floods_the_cache_pushes_out_its_own_blocks_only(
    num_host_blocks: int,
) -> None:
    books = Books(64, 4, num_host_blocks)
    quiet = [stream(seed, 20) for seed in range(5)]
    for token_ids in quiet:
        books.run(token_ids, "quiet")
    before = cached_share(books, quiet, "quiet")
    flood = [stream(1000 + seed, 20) for seed in range(128)]
    for i, token_ids in enumerate(flood):
        books.run(token_ids, "loud")
        if i % 16 == 15:
            books.check()
    after = cached_share(books, quiet, "quiet")
    assert before > 0.9
    assert after >= before - 0.05
    assert 0.04 < cached_share(books, flood, "loud") < 0.5


def test_two_loud_scopes_share_the_cache_evenly() -> None:
    books = Books(32, 4)
    rng = Random(1)
    prompts = {scope: [stream(ord(scope) * 100 + i, 12) for i in range(40)] for scope in "ab"}
    for i in range(40):
        # One of them is ten times as loud.
        books.run(prompts["a"][i], "a")
        if rng.random() < 0.1:
            books.run(prompts["b"][i], "b")
    for i in range(8):
        books.run(prompts["b"][i], "b")
    kept = {
        scope: sum(books.run(prompt, scope) > 0 for prompt in latest)
        for scope, latest in (("a", prompts["a"][-4:]), ("b", prompts["b"][4:8]))
    }
    assert kept == {"a": 4, "b": 4}
