"""Keys, values and attention of the measured model, in blocks that lie in any order.

All sequences of a step have the same number of tokens, as a benchmark has them; the kernels do
not know.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_kernels import BOUNDS, Case, Place
from benchmarks.gpu_shape import LlamaShape
from kernels.attention_rows import AttentionRows, AttentionShape, attention_rows
from kernels.paged_attention import Look, paged_attention
from kernels.reference.paged_attention import write_kv
from kernels.reference.rope import apply_rope, rope_tables

# Layer and its qkv [tokens, qkv_width] in, attended [tokens, heads x head_dim] out.
Attend = Callable[[int, Tensor], Tensor]
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a step, and of each new token its position and its slot."""

    rows: AttentionRows
    positions: Tensor
    slots: Tensor
    block_tables: Tensor


def lay_out(
    shape: LlamaShape, place: Place, sequences: int, context: int, new_tokens: int
) -> Layout:
    """So many sequences with `context` tokens stored and new ones behind them."""
    width = -(-(context + new_tokens) // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(sequences * width).astype(np.int32)
    tables = order.reshape(sequences, width)
    rows = attention_rows(
        np.full(sequences, context),
        np.full(sequences, new_tokens),
        tables,
        AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK_SIZE, place.dtype),
        place.device,
    )
    positions = np.arange(context, context + new_tokens)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    return Layout(
        rows,
        torch.from_numpy(np.tile(positions, sequences)).to(place.device),
        torch.from_numpy(slots.ravel()).to(place.device),
        torch.from_numpy(tables.astype(np.int64)).to(place.device),
    )


def num_slots(sequences: int, tokens: int) -> int:
    """Slots that so many sequences of so many tokens take, in whole blocks."""
    return sequences * -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


class PagedCache:
    """One cache for each layer, [2 x kv_heads, slots, head_dim], for the longest step of a plan."""

    def __init__(self, shape: LlamaShape, place: Place, slots: int, tokens: int) -> None:
        self._shape, self._place = shape, place
        self._look = Look(scale=shape.head_dim**-0.5)
        self._caches = torch.zeros(
            (shape.layers, 2 * shape.kv_heads, slots, shape.head_dim),
            dtype=place.dtype,
            device=place.device,
        )
        pairs = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        tables = rope_tables(shape.rope_theta**-pairs, tokens)
        self._cos, self._sin = (table.to(place.device, place.dtype) for table in tables)

    def attention(self, sequences: int, context: int, new_tokens: int) -> Attend:
        """How the new tokens of so many sequences are stored, and what they see."""
        shape = self._shape
        layout = lay_out(shape, self._place, sequences, context, new_tokens)
        cos, sin = self._cos[layout.positions], self._sin[layout.positions]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(len(qkv), -1, shape.head_dim)
            turned = apply_rope(heads[:, : -shape.kv_heads].contiguous(), cos, sin)
            kv = torch.cat((turned[:, shape.heads :], heads[:, -shape.kv_heads :]), dim=1)
            write_kv(self._caches[layer], kv, layout.slots)
            out = paged_attention(
                turned[:, : shape.heads], self._caches[layer], layout.rows, self._look
            )
            return out.view(len(qkv), -1)

        return attend


def attention_cases(
    shape: LlamaShape, place: Place, sizes: Sequence[tuple[int, int, int]]
) -> Iterator[Case]:
    """Attention of steps of (sequences, tokens stored, new tokens)."""
    for sequences, context, new_tokens in sizes:
        layout = lay_out(shape, place, sequences, context, new_tokens)
        slots = num_slots(sequences, context + new_tokens)
        cache = place.normal(2 * shape.kv_heads, slots, shape.head_dim)
        query = place.normal(sequences * new_tokens, shape.heads, shape.head_dim)
        look = Look(scale=shape.head_dim**-0.5)
        seen = new_tokens * context + new_tokens * (new_tokens + 1) // 2
        stored = shape.kv_width * (context + new_tokens)
        size = place.dtype.itemsize
        yield Case(
            f"paged_attention {sequences} x {new_tokens} after {context}",
            partial(paged_attention, query, cache, layout.rows, look),
            partial(_dense, query, cache, layout, look.scale),
            BOUNDS[place.dtype],
            size * (sequences * stored + 2 * query.numel()),
            4 * sequences * seen * shape.heads * shape.head_dim,
        )


def _dense(query: Tensor, cache: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same in float64, a sequence at a time."""
    sequences = len(layout.block_tables)
    last = int(layout.positions[-1]) + 1
    kv_heads = len(cache) // 2
    offsets = torch.arange(BLOCK_SIZE, device=cache.device)
    outs = []
    for table, own in zip(layout.block_tables, query.double().chunk(sequences), strict=True):
        slots = (table[:, None] * BLOCK_SIZE + offsets).flatten()[:last]
        kv = cache[:, slots].double()
        visible = torch.ones(len(own), last, dtype=torch.bool, device=cache.device)
        out = functional.scaled_dot_product_attention(
            own.transpose(0, 1)[None],
            kv[None, :kv_heads],
            kv[None, kv_heads:],
            attn_mask=visible.tril(last - len(own)),
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
