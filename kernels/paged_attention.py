"""Attention over a KV cache that lies in blocks, for decodes and chunks of prompts in one step.

    out[t, h] = sum over s of softmax over s(scale q[t, h] . k[s, h / group]) v[s, h / group]

where s are the places that token t sees: at position p, places 0 .. p of its row, or with a
window the last `window` of them. A soft cap squeezes scores first: cap x tanh(score / cap).

Shapes: query, out [tokens, heads, head_dim]; cache [2 x kv_heads, num_slots, head_dim], keys of
every head, then values, in the queries' dtype or e4m3 with one scale for keys and one for values;
place s of a row lies in slot block_table[s / block_size] x block_size + s % block_size.

A program computes a tile: tokens x heads of one group are the rows of a product on tensor cores
(GQA shares each key that was read), keys come tile by tile, and softmax is kept up to date in
float32 in powers of two. Tiles that every row of the program sees whole need no mask, and come
first. A decode's tile is one token; if there are too few decodes to fill a GPU, several programs
share a context and a second kernel merges their parts (split-KV).

Bytes moved, at e bytes a cached number: decodes 2 e kv_heads head_dim x context, each context
once; chunks that for each tile of a row; 8 heads head_dim splits a decode for parts. Places that
nobody sees are not read. Not yet measured on a GPU.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917, SIM108 - a kernel's arguments are flat, its branches static

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_rows import AttentionRows
from kernels.tuned_shapes import AttentionTile, Work, num_splits

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Look:
    """How a layer looks back: scores times `scale`, over the last `window` places or all.

    An e4m3 cache holds keys divided by `key_scale` and values divided by `value_scale`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


# The width of tables changes from step to step, and is not worth a kernel of its own.
@triton.jit(do_not_specialize=["table_stride", "window"])
def paged_attention_kernel(
    query: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    weights: tl.tensor,
    tiles: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    block_tables: tl.tensor,
    query_stride: int,
    table_stride: int,
    num_slots: int,
    scale: float,
    soft_cap: float,
    value_scale: float,
    window: int,
    has_window: tl.constexpr,
    has_soft_cap: tl.constexpr,
    splits: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    tile_tokens: tl.constexpr,
) -> None:
    """One tile of one key head; with more than one split, one part of its context, in `out`.

    `weights` then takes the base-2 logarithm of what softmax divided the part by.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - begin
    start = tl.load(starts + row)

    lane = tl.arange(0, block_rows)
    token = first + lane // group
    is_query = (token < count) & (lane < tile_tokens * group)
    head = kv_head * group + lane % group
    dim = tl.arange(0, block_dim)
    is_number = is_query[:, None] & (dim < head_dim)[None, :]
    at = (begin + token).to(tl.int64)[:, None] * query_stride
    q = tl.load(  # [block_rows, block_dim]
        query + at + head[:, None] * head_dim + dim[None, :], mask=is_number, other=0.0
    )

    # Places [low, end) are seen by somebody; [low, whole) by all, if there is no window.
    end = start + tl.minimum(first + tile_tokens, count)
    low = 0
    if has_window:
        low = tl.maximum(start + first - window + 1, 0) // block_keys * block_keys
    length = tl.cdiv(tl.cdiv(end - low, block_keys), splits) * block_keys
    low += split * length
    end = tl.minimum(end, low + length)
    whole = low
    if not has_window:
        whole = tl.maximum(low, tl.minimum(end, start + first + 1) // block_keys * block_keys)

    keys = cache + kv_head.to(tl.int64) * num_slots * head_dim
    values = keys + kv_heads.to(tl.int64) * num_slots * head_dim
    table = block_tables + row * table_stride
    position = start + token
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    sums = tl.zeros((block_rows, block_dim), tl.float32)
    # fmt: off
    sums, total, best = _look(
        sums, total, best, q, position, keys, values, table, low, whole, scale, soft_cap, window,
        False, has_window, has_soft_cap, head_dim, block_dim, block_size, block_keys,
    )
    sums, total, best = _look(
        sums, total, best, q, position, keys, values, table, whole, end, scale, soft_cap, window,
        True, has_window, has_soft_cap, head_dim, block_dim, block_size, block_keys,
    )
    # fmt: on
    # A part in which nobody sees anything is zero, and weighs nothing.
    sums = sums * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    if splits == 1:
        heads = kv_heads * group
        at = ((begin + token).to(tl.int64)[:, None] * heads + head[:, None]) * head_dim
    else:
        part = (tile.to(tl.int64) * kv_heads * group + head) * splits + split
        tl.store(weights + part, best + tl.log2(total), mask=is_query)
        at = part[:, None] * head_dim
    tl.store(out + at + dim[None, :], sums, mask=is_number)


@triton.jit
def _look(
    sums: tl.tensor,
    total: tl.tensor,
    best: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: int,
    end: int,
    scale: float,
    soft_cap: float,
    window: int,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_soft_cap: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_size: tl.constexpr,
    block_keys: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the places [begin, end) into sums [block_rows, block_dim], total and best [block_rows].

    Without `is_masked` they are whole tiles, and every row sees all of them.
    """
    dim = tl.arange(0, block_dim)
    lane = tl.arange(0, block_keys)
    # Blocks are looked up a tile ahead, so that keys do not wait for where they lie.
    block = tl.load(table + (begin + lane) // block_size, mask=begin + lane < end, other=0)
    for first in tl.range(begin, end, block_keys):
        place = first + lane
        is_place = place < end
        slot = block.to(tl.int64) * block_size + place % block_size
        ahead = place + block_keys
        block = tl.load(table + ahead // block_size, mask=ahead < end, other=0)  # [block_keys]
        at = slot[:, None] * head_dim + dim[None, :]
        is_number = is_place[:, None] & (dim < head_dim)[None, :]
        is_whole: tl.constexpr = not is_masked and head_dim == block_dim
        if is_whole:
            k = tl.load(keys + at)  # [block_keys, block_dim]
        else:
            k = tl.load(keys + at, mask=is_number, other=0.0)  # [block_keys, block_dim]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if has_soft_cap:
            # tanh by what may overflow to infinity, and then is one.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if is_masked:
            is_seen = place[None, :] <= position[:, None]
            if has_window:
                is_seen = is_seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Nobody may have been seen yet: infinity less infinity would be NaN.
        ground = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - ground)
        shares = tl.exp2(scores - ground[:, None])  # [block_rows, block_keys]
        total = total * shrink + tl.sum(shares, axis=1)
        if is_whole:
            v = tl.load(values + at)  # [block_keys, block_dim]
        else:
            v = tl.load(values + at, mask=is_number, other=0.0)  # [block_keys, block_dim]
        sums = tl.dot(
            shares.to(q.dtype), v.to(q.dtype), sums * shrink[:, None], input_precision="ieee"
        )
        best = new_best
    return sums, total, best


@triton.jit
def merge_parts_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    offsets: tl.tensor,
    splits: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """One head of one decode: the mean of its parts, by how much softmax they hold."""
    tile, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    dim = tl.arange(0, block_dim)
    is_dim = dim < head_dim
    part = (tile.to(tl.int64) * heads + head) * splits + tl.arange(0, splits)
    weight = tl.load(weights + part)  # [splits]
    share = tl.exp2(weight - tl.max(weight, axis=0))
    values = tl.load(  # [splits, block_dim]
        parts + part[:, None] * head_dim + dim[None, :], mask=is_dim[None, :], other=0.0
    )
    mean = tl.sum(values * share[:, None], axis=0) / tl.sum(share, axis=0)
    token = tl.load(offsets + tl.load(tiles + 2 * tile)).to(tl.int64)
    tl.store(out + (token * heads + head) * head_dim + dim, mean, mask=is_dim)


def paged_attention(query: Tensor, cache: Tensor, rows: AttentionRows, look: Look) -> Tensor:
    """Let query [tokens, heads, head_dim] look; its keys and values are in the cache already.

    Tokens may lie apart; the result [tokens, heads, head_dim] lies close.
    """
    shape = rows.shape
    assert query.shape[1:] == (shape.num_heads, shape.head_dim), (query.shape, shape)
    assert query.dtype is shape.dtype, (query.dtype, shape)
    assert query.stride()[1:] == (shape.head_dim, 1), query.stride()
    assert cache.shape[::2] == (2 * shape.num_kv_heads, shape.head_dim), (cache.shape, shape)
    assert cache.dtype in {query.dtype, torch.float8_e4m3fn}, (cache.dtype, query.dtype)
    assert cache.is_contiguous(), cache.stride()
    out = torch.empty(tuple(query.shape), dtype=query.dtype, device=query.device)
    for work, tiles in ((Work.CHUNK, rows.chunks), (Work.DECODE, rows.decodes)):
        if len(tiles):
            _launch(work, (query, cache, out), rows, look)
    return out


def _launch(
    work: Work, tensors: tuple[Tensor, Tensor, Tensor], rows: AttentionRows, look: Look
) -> None:
    query, cache, out = tensors
    shape, tile = rows.shape, rows.shape.tile(work, query.device)
    tiles = rows.chunks if work is Work.CHUNK else rows.decodes
    splits = _splits(work, tile, rows, look)
    block_rows = shape.rows_of(work, tile)
    target = weights = out
    if splits > 1:
        sizes = (len(tiles), shape.num_heads, splits)
        target = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=out.device)
        weights = torch.empty(sizes, dtype=torch.float32, device=out.device)
    paged_attention_kernel[(len(tiles), shape.num_kv_heads, splits)](
        query,
        cache,
        target,
        weights,
        tiles,
        rows.starts,
        rows.offsets,
        rows.block_tables,
        query.stride(0),
        rows.block_tables.stride(0),
        cache.shape[1],
        **_numbers(look),
        splits=splits,
        group=shape.group,
        head_dim=shape.head_dim,
        block_dim=shape.block_dim,
        block_size=shape.block_size,
        block_rows=block_rows,
        block_keys=tile.block_keys,
        tile_tokens=1 if work is Work.DECODE else block_rows // shape.group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        merge_parts_kernel[(len(tiles), shape.num_heads)](
            target,
            weights,
            out,
            tiles,
            rows.offsets,
            splits=splits,
            head_dim=shape.head_dim,
            block_dim=shape.block_dim,
            num_warps=4,
        )


def _splits(work: Work, tile: AttentionTile, rows: AttentionRows, look: Look) -> int:
    if work is Work.CHUNK:
        return 1
    longest = rows.longest if look.window is None else min(rows.longest, look.window)
    return num_splits(tile, len(rows.decodes) * rows.shape.num_kv_heads, longest)


def _numbers(look: Look) -> dict[str, float | int | bool]:
    """The kernel's own view: exponents are of two, and twice the score is what tanh is made of."""
    scale, cap = look.scale * look.key_scale, look.soft_cap
    return {
        "scale": scale * _LOG2_E if cap is None else 2 * _LOG2_E * scale / cap,
        "soft_cap": 0.0 if cap is None else cap * _LOG2_E,
        "value_scale": look.value_scale,
        "window": 0 if look.window is None else look.window,
        "has_window": look.window is not None,
        "has_soft_cap": cap is not None,
    }
