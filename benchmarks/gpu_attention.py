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
from kernels.copy_blocks import copy_blocks
from kernels.paged_attention import Look, paged_attention
from kernels.reference.rope import apply_rope, rope_tables
from kernels.rope_store import Store, Turn, rope_store

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
        self._turn = Turn(_rope(shape, place, tokens))

    def attention(self, sequences: int, context: int, new_tokens: int) -> Attend:
        """How the new tokens of so many sequences are stored, and what they see."""
        layout = lay_out(self._shape, self._place, sequences, context, new_tokens)
        stores = [Store(cache, layout.slots) for cache in self._caches]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query = rope_store(qkv, layout.positions, self._turn, stores[layer])
            out = paged_attention(query, self._caches[layer], layout.rows, self._look)
            return out.view(len(qkv), -1)

        return attend


def cache_cases(shape: LlamaShape, place: Place, tokens: int) -> Iterator[Case]:
    """Storing so many tokens, and moving as many to other blocks."""
    size, slots = place.dtype.itemsize, num_slots(1, tokens)
    layout = lay_out(shape, place, 1, 0, tokens)
    cos, sin = _rope(shape, place, tokens)
    qkv = place.normal(tokens, shape.qkv_width)
    cache = place.normal(2 * shape.kv_heads, slots, shape.head_dim)
    turn, store = Turn((cos, sin)), Store(cache, layout.slots)
    yield Case(
        f"rope_store [{tokens}, {shape.qkv_width}]",
        partial(_turned_and_stored, qkv, layout.positions, turn, store),
        partial(_turned, qkv, (cos, sin), shape),
        BOUNDS[place.dtype],
        2 * size * qkv.numel(),
        timed=partial(rope_store, qkv, layout.positions, turn, store),
    )
    blocks = torch.randperm(slots // BLOCK_SIZE, device=place.device)
    moves = (blocks, blocks.flip(0))
    target = torch.zeros_like(cache)
    yield Case(
        f"copy_blocks {len(blocks)} of {BLOCK_SIZE} x {shape.head_dim}",
        partial(_moved, cache, target, moves),
        partial(_strewn, cache, moves),
        0.0,
        2 * size * cache.numel(),
        timed=partial(copy_blocks, cache, target, moves, BLOCK_SIZE),
    )


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


def _rope(shape: LlamaShape, place: Place, tokens: int) -> tuple[Tensor, Tensor]:
    pairs = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    cos, sin = rope_tables(shape.rope_theta**-pairs, tokens)
    return cos.to(place.device, place.dtype), sin.to(place.device, place.dtype)


def _turned_and_stored(qkv: Tensor, positions: Tensor, turn: Turn, store: Store) -> Tensor:
    query = rope_store(qkv, positions, turn, store)
    return torch.cat((query, store.cache[:, store.slots].transpose(0, 1)), dim=1)


def _turned(qkv: Tensor, rope: tuple[Tensor, Tensor], shape: LlamaShape) -> Tensor:
    heads = qkv.double().view(len(qkv), -1, shape.head_dim)
    cos, sin = (table.double() for table in rope)
    turned = apply_rope(heads[:, : -shape.kv_heads].contiguous(), cos, sin)
    return torch.cat((turned, heads[:, -shape.kv_heads :]), dim=1)


def _moved(cache: Tensor, target: Tensor, moves: tuple[Tensor, Tensor]) -> Tensor:
    copy_blocks(cache, target, moves, BLOCK_SIZE)
    return target


def _strewn(cache: Tensor, moves: tuple[Tensor, Tensor]) -> Tensor:
    sources, destinations = moves
    blocks = cache.view(len(cache), -1, BLOCK_SIZE, cache.shape[-1])
    strewn = torch.zeros_like(blocks)
    strewn[:, destinations] = blocks[:, sources]
    return strewn.view(cache.shape).double()
