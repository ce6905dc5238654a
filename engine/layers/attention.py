"""Attention of one step: which rows attend to which blocks, built once and used by all layers.

Rows that compute one token are gathered, padded and attended together, grouped by context
length so that one long conversation does not make all the others pay for it. Longer runs
(chunks) go one by one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.paged_attention import (
    attend_chunk,
    attend_decode,
    causal_mask,
    gather_kv,
    gather_rows,
    write_kv,
)

# Contexts up to this many blocks share one group: below it, padding costs less than a call.
_SMALL_CONTEXT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's rows in this step: `count` tokens from position `start`, and its blocks."""

    start: int
    count: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one layer is [2 x num_kv_heads, num_blocks x block_size, head_dim]."""

    num_kv_heads: int
    num_blocks: int
    block_size: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each: their numbers, the cache rows to collect, and the length mask."""

    rows: Tensor
    cache_rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's rows, the cache rows to collect, and who sees what of them."""

    rows: slice
    cache_rows: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's attention: `slots` [rows] to write, then groups and chunks to attend."""

    shape: CacheShape
    slots: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]

    def attend(self, query: Tensor, kv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Store kv [rows, 2 x kv_heads, head_dim], then let query [rows, heads, head_dim] look."""
        write_kv(cache, kv, self.slots)
        if len(self.groups) == 1 and not self.chunks:
            return self._attend_group(self.groups[0], query, cache, scale)
        out = torch.empty_like(query)
        for group in self.groups:
            out[group.rows] = self._attend_group(group, query[group.rows], cache, scale)
        for chunk in self.chunks:
            context = gather_kv(cache, chunk.cache_rows, self.shape.block_size)
            context = context.view(2, self.shape.num_kv_heads, -1, self.shape.head_dim)
            out[chunk.rows] = attend_chunk(query[chunk.rows], context, chunk.visible, scale)
        return out

    def _attend_group(
        self, group: DecodeGroup, query: Tensor, cache: Tensor, scale: float
    ) -> Tensor:
        context = gather_kv(cache, group.cache_rows, self.shape.block_size)
        return attend_decode(query, context, group.bias, scale)


def attention_batch(spans: list[Span], shape: CacheShape, dtype: torch.dtype) -> AttentionBatch:
    """Lay out a step whose rows are the spans one after another."""
    slots: list[int] = []
    decodes: dict[int, list[tuple[int, Span]]] = {}
    chunks: list[Chunk] = []
    for span in spans:
        first = len(slots)
        slots += _slots_of(span, shape.block_size)
        if span.count == 1:
            decodes.setdefault(_length_class(span, shape.block_size), []).append((first, span))
        else:
            rows = gather_rows(
                torch.tensor([span.block_table]), shape.num_kv_heads, shape.num_blocks
            )
            visible = causal_mask(span.start, span.count)
            chunks.append(Chunk(slice(first, first + span.count), rows, visible))
    groups = tuple(_decode_group(members, shape, dtype) for members in decodes.values())
    return AttentionBatch(shape, torch.tensor(slots), groups, tuple(chunks))


def _slots_of(span: Span, block_size: int) -> list[int]:
    return [
        span.block_table[position // block_size] * block_size + position % block_size
        for position in range(span.start, span.start + span.count)
    ]


def _length_class(span: Span, block_size: int) -> int:
    """Contexts of one class differ in length by less than a factor of two."""
    num_blocks = span.start // block_size + 1
    return (max(num_blocks, _SMALL_CONTEXT_BLOCKS) - 1).bit_length()


def _decode_group(
    members: list[tuple[int, Span]], shape: CacheShape, dtype: torch.dtype
) -> DecodeGroup:
    lengths = torch.tensor([span.start + 1 for _, span in members])
    width = max(len(span.block_table) for _, span in members)
    # Padding points at block 0: read, masked, never seen.
    tables = torch.tensor(
        [span.block_table + (0,) * (width - len(span.block_table)) for _, span in members]
    )
    beyond = torch.arange(width * shape.block_size) >= lengths[:, None]
    bias = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
    return DecodeGroup(
        rows=torch.tensor([first for first, _ in members]),
        cache_rows=gather_rows(tables, shape.num_kv_heads, shape.num_blocks),
        bias=bias.repeat_interleave(shape.num_kv_heads, dim=0).unsqueeze(1),
    )
