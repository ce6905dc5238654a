"""Attention of one step: which rows attend to which blocks, built once and used by all layers.

Rows that compute one token are gathered, padded and attended together, grouped by context
length so that one long conversation does not make all the others pay for it. Longer runs
(chunks) go one by one. Layers with a sliding window collect the blocks that the window touches
and no others, so a step has one such plan per window that the model has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.layers.step_layout import Ints, StepLayout
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
class AttentionRules:
    """How a layer looks back: scores times `scale`, over the last `window` positions or all.

    `soft_cap` squeezes scores into (-cap, cap).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each: their numbers, the cache rows to collect, and who sees what."""

    rows: Tensor
    cache_rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's rows, where its context lies, and who sees what of it.

    A context whose blocks follow each other is read where it is, from `slots`; another one is
    collected from `cache_rows`.
    """

    rows: slice
    slots: slice | None
    cache_rows: Tensor
    visible: Tensor
    num_uneven: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one window collect: together, groups and chunks are all rows."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's attention: `slots` [rows] to write, then a plan by window to attend."""

    shape: CacheShape
    slots: Tensor
    plans: Mapping[int | None, AttentionPlan]

    def attend(self, query: Tensor, kv: Tensor, cache: Tensor, rules: AttentionRules) -> Tensor:
        """Store kv [rows, 2 x kv_heads, head_dim], then let query [rows, heads, head_dim] look."""
        write_kv(cache, kv, self.slots)
        plan = self.plans[rules.window]
        if len(plan.groups) == 1 and not plan.chunks:
            return self._attend_group(plan.groups[0], query, cache, rules)
        out = torch.empty_like(query)
        for group in plan.groups:
            out[group.rows] = self._attend_group(group, query[group.rows], cache, rules)
        for chunk in plan.chunks:
            if chunk.slots is not None:
                context = cache[:, chunk.slots]
            else:
                context = gather_kv(cache, chunk.cache_rows, self.shape.block_size)
            context = context.view(2, self.shape.num_kv_heads, -1, self.shape.head_dim)
            out[chunk.rows] = attend_chunk(
                query[chunk.rows],
                context,
                chunk.visible,
                chunk.num_uneven,
                rules.scale,
                rules.soft_cap,
            )
        return out

    def _attend_group(
        self, group: DecodeGroup, query: Tensor, cache: Tensor, rules: AttentionRules
    ) -> Tensor:
        context = gather_kv(cache, group.cache_rows, self.shape.block_size)
        return attend_decode(query, context, group.bias, rules.scale, rules.soft_cap)


def attention_batch(
    layout: StepLayout,
    shape: CacheShape,
    dtype: torch.dtype,
    windows: Collection[int | None] = (None,),
) -> AttentionBatch:
    """Prepare the attention of a step; rows are numbered as its tokens lie."""
    plans = {window: _Planner(layout, shape, dtype, window).plan() for window in windows}
    return AttentionBatch(shape, torch.from_numpy(layout.slots), plans)


class _Planner:
    """Plans one step for the layers of one window."""

    def __init__(
        self, layout: StepLayout, shape: CacheShape, dtype: torch.dtype, window: int | None
    ) -> None:
        self._layout = layout
        self._shape = shape
        self._dtype = dtype
        self._window = window
        # The first block of each row that anybody in it looks at.
        self._firsts = np.zeros_like(layout.starts)
        if window is not None:
            self._firsts = (layout.starts - window + 1).clip(min=0) // shape.block_size
        self._num_seen = layout.num_blocks - self._firsts

    def plan(self) -> AttentionPlan:
        is_decode = self._layout.counts == 1
        decodes = np.flatnonzero(is_decode)
        # Contexts of one class differ in length by less than a factor of two: the class is the
        # bit length of a number of blocks.
        _, classes = np.frexp(self._num_seen[decodes].clip(min=_SMALL_CONTEXT_BLOCKS) - 1)
        groups = tuple(
            self._decode_group(decodes[classes == one_class]) for one_class in np.unique(classes)
        )
        chunks = tuple(self._chunk(row) for row in np.flatnonzero(~is_decode).tolist())
        return AttentionPlan(groups, chunks)

    def _decode_group(self, members: Ints) -> DecodeGroup:
        layout, shape = self._layout, self._shape
        first = self._firsts[members, None]
        width = int(self._num_seen[members].max())
        columns = first + np.arange(width)
        # Padding points at a block of the row's own, never at another's: what is masked is still
        # multiplied, and in this very step another row may write a NaN into its own blocks.
        columns = np.where(columns < layout.num_blocks[members, None], columns, first)
        tables = torch.from_numpy(layout.block_tables[members[:, None], columns])
        # Places are counted from the first collected one on.
        places = torch.arange(width * shape.block_size)
        own = torch.from_numpy(layout.starts[members, None] - first * shape.block_size)
        hidden = places > own
        if self._window is not None:
            hidden |= places <= own - self._window
        bias = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return DecodeGroup(
            rows=torch.from_numpy(layout.offsets[members]),
            cache_rows=gather_rows(tables, shape.num_kv_heads, shape.num_blocks),
            bias=bias.repeat_interleave(shape.num_kv_heads, dim=0).unsqueeze(1),
        )

    def _chunk(self, row: int) -> Chunk:
        layout, shape = self._layout, self._shape
        offset, count, first = (int(a[row]) for a in (layout.offsets, layout.counts, self._firsts))
        blocks = layout.block_tables[row, first : layout.num_blocks[row]]
        is_one_run = bool((np.diff(blocks) == 1).all())
        begin = int(blocks[0]) * shape.block_size
        start = int(layout.starts[row]) - first * shape.block_size
        return Chunk(
            rows=slice(offset, offset + count),
            slots=slice(begin, begin + len(blocks) * shape.block_size) if is_one_run else None,
            cache_rows=gather_rows(
                torch.from_numpy(blocks[None]), shape.num_kv_heads, shape.num_blocks
            ),
            visible=causal_mask(start, count, self._window),
            num_uneven=count if self._window is None else start + count,
        )
