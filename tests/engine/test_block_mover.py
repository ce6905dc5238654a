"""Moves on the real tensor layout: every head and layer of a block goes with it, bit by bit."""

import random

import pytest
import torch
from torch import Tensor

from engine.execution.block_mover import BlockMover
from engine.interface.block_move import BlockMove
from tests.engine.steps import copy, load, offload

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 3, 4, 10, 3, 7, 5


def some_caches(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(LAYERS, HEADS, NUM_BLOCKS * BLOCK_SIZE, HEAD_DIM).to(dtype)


def block(caches: Tensor, number: int) -> Tensor:
    return caches[:, :, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_over_the_host_keeps_every_bit(dtype: torch.dtype) -> None:
    caches = some_caches(dtype)
    before = caches.clone()
    mover = BlockMover(caches, BLOCK_SIZE, NUM_HOST_BLOCKS)
    mover.carry_out([offload(6, 4), offload(0, 0)])
    assert torch.equal(caches, before)
    caches.fill_(float("nan"))
    mover.carry_out([load(4, 1), load(0, 6)])
    assert torch.equal(block(caches, 1), block(before, 6))
    assert torch.equal(block(caches, 6), block(before, 0))
    assert bool(block(caches, 0).isnan().all())
    assert int(caches.isfinite().sum()) == 2 * LAYERS * HEADS * BLOCK_SIZE * HEAD_DIM


def test_a_copy_changes_its_destination_alone() -> None:
    caches = some_caches()
    before = caches.clone()
    BlockMover(caches, BLOCK_SIZE, 0).carry_out([copy(5, 2)])
    for number in range(NUM_BLOCKS):
        assert torch.equal(block(caches, number), block(before, 5 if number == 2 else number))


def test_any_moves_in_a_row_are_those_moves_one_after_another() -> None:
    chooser = random.Random(4)
    for _ in range(50):
        caches = some_caches()
        device: list[int] = list(range(NUM_BLOCKS))
        host: list[int | None] = [None] * NUM_HOST_BLOCKS
        blocks = [block(caches, number).clone() for number in device]
        moves: list[BlockMove] = []
        for _ in range(12):
            source, destination = chooser.randrange(NUM_BLOCKS), chooser.randrange(NUM_BLOCKS)
            kept = chooser.randrange(NUM_HOST_BLOCKS)
            content = host[kept]
            if chooser.random() < 0.4:
                moves.append(copy(source, destination))
                device[destination] = device[source]
            elif content is None or chooser.random() < 0.5:
                moves.append(offload(source, kept))
                host[kept] = device[source]
            else:
                moves.append(load(kept, destination))
                device[destination] = content
        BlockMover(caches, BLOCK_SIZE, NUM_HOST_BLOCKS).carry_out(moves)
        for number, content in enumerate(device):
            assert torch.equal(block(caches, number), blocks[content])


def test_the_time_of_moves_is_measured() -> None:
    mover = BlockMover(some_caches(), BLOCK_SIZE, NUM_HOST_BLOCKS)
    assert mover.carry_out([copy(1, 2)]) > 0


def test_a_move_to_a_block_that_does_not_exist_is_an_error() -> None:
    mover = BlockMover(some_caches(), BLOCK_SIZE, NUM_HOST_BLOCKS)
    with pytest.raises(IndexError):
        mover.carry_out([offload(0, NUM_HOST_BLOCKS)])
    with pytest.raises(IndexError):
        BlockMover(some_caches(), BLOCK_SIZE, 0).carry_out([offload(0, 0)])
