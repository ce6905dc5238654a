"""Blocks are copied by Triton, in its interpreter, as a plain list of moves would do it."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.copy_blocks import copy_blocks, independent_runs


def one_by_one(
    source: Tensor, target: Tensor, moves: list[tuple[int, int]], block_size: int
) -> Tensor:
    target = target.clone()
    for origin, into in moves:
        read = slice(origin * block_size, (origin + 1) * block_size)
        target[..., into * block_size : (into + 1) * block_size, :] = source[..., read, :]
    return target


def as_tensors(moves: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    sources, destinations = torch.tensor(moves, dtype=torch.int64).view(-1, 2).T.contiguous()
    return sources, destinations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("heads", "block_size", "head_dim"), [((2, 6), 16, 64), ((4,), 4, 80), ((3, 2), 5, 12)]
)
def test_blocks_move_between_caches_of_different_sizes(
    heads: tuple[int, ...], block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    source = torch.randn(*heads, 9 * block_size, head_dim).to(dtype)
    target = torch.full((*heads, 4 * block_size, head_dim), torch.nan).to(dtype)
    moves = [(8, 0), (0, 3), (4, 1)]
    expected = one_by_one(source.float(), target.float(), moves, block_size)
    copy_blocks(source, target, as_tensors(moves), block_size)
    assert torch.equal(target.float().nan_to_num(999.0), expected.nan_to_num(999.0))


def test_runs_of_memory_longer_than_one_program_takes_at_once_are_copied_whole() -> None:
    cache = torch.randn(2, 3 * 33, 63)
    expected = one_by_one(cache, cache, [(2, 0)], 33)
    copy_blocks(cache, cache, as_tensors([(2, 0)]), 33)
    assert torch.equal(cache, expected)


def test_more_runs_than_programs_are_all_copied() -> None:
    source, target = torch.randn(40, 8, 4), torch.zeros(40, 8, 4)
    copy_blocks(source, target, as_tensors([(0, 1), (1, 0)]), 4)
    assert torch.equal(target, source.view(40, 2, 4, 4).flip(1).view(40, 8, 4))


def test_no_moves_move_nothing() -> None:
    cache = torch.randn(2, 8, 4)
    kept = cache.clone()
    copy_blocks(cache, cache, as_tensors([]), 4)
    assert torch.equal(cache, kept)
    assert list(independent_runs([])) == []


MOVES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@settings(deadline=None, max_examples=300)
@given(moves=MOVES)
def test_pieces_that_happen_at_once_leave_what_one_move_after_another_leaves(
    moves: list[tuple[int, int]],
) -> None:
    cache = list(range(6))
    expected = list(cache)
    for source, destination in moves:
        expected[destination] = expected[source]
    pieces = list(independent_runs(moves))
    assert list(chain.from_iterable(pieces)) == moves
    for piece in pieces:
        read = [cache[source] for source, _ in piece]
        assert len({destination for _, destination in piece}) == len(piece)
        # Whichever of a piece's reads and writes come first, the outcome is this.
        assert not {d for s, d in piece if s != d} & {s for s, d in piece if s != d}
        for value, (_, destination) in zip(read, piece, strict=True):
            cache[destination] = value
    assert cache == expected


def test_moves_that_do_not_meet_stay_together() -> None:
    assert len(list(independent_runs([(0, 1), (0, 2), (3, 4)]))) == 1
