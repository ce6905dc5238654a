"""Attention of one step: which rows attend to which blocks, built once and used by all layers.

Rows that compute one token are gathered, padded and attended together, grouped by context
length so that one long conversation does not make all the others pay for it. Longer runs
(chunks) go one by one.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.step_layout import StepLayout
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


def attention_batch(layout: StepLayout, shape: CacheShape, dtype: torch.dtype) -> AttentionBatch:
    """Prepare the attention of a step; rows are numbered as its tokens lie."""
    is_decode = layout.counts == 1
    decodes = np.flatnonzero(is_decode)
    # Contexts of one class differ in length by less than a factor of two: the class is the bit
    # length of a number of blocks.
    _, classes = np.frexp(layout.num_blocks[decodes].clip(min=_SMALL_CONTEXT_BLOCKS) - 1)
    groups = tuple(
        _decode_group(decodes[classes == one_class], layout, shape, dtype)
        for one_class in np.unique(classes)
    )
    chunks = tuple(_chunk(row, layout, shape) for row in np.flatnonzero(~is_decode).tolist())
    return AttentionBatch(shape, torch.from_numpy(layout.slots), groups, chunks)


def _decode_group(
    members: NDArray[np.int64], layout: StepLayout, shape: CacheShape, dtype: torch.dtype
) -> DecodeGroup:
    num_blocks = layout.num_blocks[members]
    width = int(num_blocks.max())
    tables = layout.block_tables[members, :width]
    # Padding points at the row's own first block, never at another's: what is masked is still
    # multiplied, and in this very step another row may write a NaN into its own blocks.
    tables = np.where(np.arange(width) < num_blocks[:, None], tables, tables[:, :1])
    lengths = torch.from_numpy(layout.starts[members] + 1)
    beyond = torch.arange(width * shape.block_size) >= lengths[:, None]
    bias = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
    return DecodeGroup(
        rows=torch.from_numpy(layout.offsets[members]),
        cache_rows=gather_rows(torch.from_numpy(tables), shape.num_kv_heads, shape.num_blocks),
        bias=bias.repeat_interleave(shape.num_kv_heads, dim=0).unsqueeze(1),
    )


def _chunk(row: int, layout: StepLayout, shape: CacheShape) -> Chunk:
    first, count = int(layout.offsets[row]), int(layout.counts[row])
    table = layout.block_tables[row : row + 1, : layout.num_blocks[row]]
    return Chunk(
        rows=slice(first, first + count),
        cache_rows=gather_rows(torch.from_numpy(table), shape.num_kv_heads, shape.num_blocks),
        visible=causal_mask(int(layout.starts[row]), count),
    )
