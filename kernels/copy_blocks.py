"""Copies blocks of KV within the device's cache, and between it and the host's.

    target[:, destinations[i]] = source[:, sources[i]]        over caches seen block by block

Shapes: caches [..., heads, num_slots, head_dim] of one dtype (the layers' in one piece, or one
layer's), with block counts of their own; sources and destinations [moves] int64. A block is
block_size x head_dim numbers of each head, one run of memory. Moved: each block once in and once
out, in words of four bytes.

The host's cache must be pinned: a GPU reads and writes it where it lies, so blocks that are
strewn over it need no buffer between, and no copy a run. That goes over the bus, which a few
programs fill; the other multiprocessors are left to the model. Not yet measured on a GPU.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917 - a kernel's arguments are flat

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_WORDS = 1024
_DEVICE_PROGRAMS = 1056
_HOST_PROGRAMS = 32
_WORD_BYTES = 4


# How many runs there are is not worth a kernel of its own.
@triton.jit(do_not_specialize=["num_runs"])
def copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    sources: tl.tensor,
    destinations: tl.tensor,
    num_runs: int,
    heads: int,
    source_blocks: int,
    target_blocks: int,
    words: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Every so-manieth run: run r is head r % heads of move r / heads, as `words` words."""
    lane = tl.arange(0, block)
    for run in tl.range(tl.program_id(0), num_runs, tl.num_programs(0)):
        move = run // heads
        head = (run % heads).to(tl.int64)
        begin = (head * source_blocks + tl.load(sources + move)) * words
        into = (head * target_blocks + tl.load(destinations + move)) * words
        for first in tl.range(0, words, block):
            word = first + lane
            values = tl.load(source + begin + word, mask=word < words)  # [block]
            tl.store(target + into + word, values, mask=word < words)


def copy_blocks(
    source: Tensor, target: Tensor, moves: tuple[Tensor, Tensor], block_size: int
) -> None:
    """Carry out moves (sources, destinations), all at once: none reads what another writes.

    `independent_runs` cuts a list into such pieces. Source and target may be the same cache;
    either may be a pinned one of the host. The work is put on the current stream.
    """
    sources, destinations = moves
    assert source.dtype is target.dtype, (source.dtype, target.dtype)
    head_dim = source.shape[-1]
    assert source.shape[:-2] == target.shape[:-2], (source.shape, target.shape)
    assert target.shape[-1] == head_dim, (source.shape, target.shape)
    for cache in (source, target):
        assert cache.is_contiguous(), cache.stride()
        assert cache.shape[-2] % block_size == 0, (cache.shape, block_size)
        assert cache.is_cuda or cache.is_pinned() or not sources.is_cuda, "host memory, not pinned"
    assert sources.shape == destinations.shape, (sources.shape, destinations.shape)
    for numbers in moves:
        assert numbers.dtype is torch.int64, numbers.dtype
        assert numbers.is_contiguous(), numbers.stride()
    num_bytes = block_size * head_dim * source.element_size()
    assert num_bytes % _WORD_BYTES == 0, (block_size, head_dim, source.dtype)
    heads = source.shape[:-2].numel()
    runs = len(sources) * heads
    if runs:
        is_on_device = source.is_cuda and target.is_cuda
        words = num_bytes // _WORD_BYTES
        copy_blocks_kernel[(min(runs, _DEVICE_PROGRAMS if is_on_device else _HOST_PROGRAMS),)](
            source.view(torch.int32),
            target.view(torch.int32),
            sources,
            destinations,
            runs,
            heads,
            source.shape[-2] // block_size,
            target.shape[-2] // block_size,
            words=words,
            block=min(int(triton.next_power_of_2(words)), _BLOCK_WORDS),
            num_warps=4,
        )


def independent_runs(moves: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Cut moves (source, destination) within one cache into pieces that may happen at once.

    One after another, the pieces leave what the moves one after another would have left.
    """
    begin, read, written = 0, set[int](), set[int]()
    for place, (source, destination) in enumerate(moves):
        if source in written or destination in written or destination in read:
            yield moves[begin:place]
            begin, read, written = place, set(), set()
        read.add(source)
        written.add(destination)
    if moves:
        yield moves[begin:]
