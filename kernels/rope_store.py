"""Turns queries and keys by their positions and stores keys and values, in one pass.

    x        = x / sqrt(mean(x^2) + eps) * weight         queries and keys, with a QK-norm (Qwen3)
    [a, b]  -> [a cos - b sin,  b cos + a sin]            queries and keys, with rope tables
    cache[h, slots[t]] = key or value h of token t

Shapes: qkv [tokens, (heads + 2 x kv_heads) x head_dim], heads of queries, then keys, then values;
positions and slots [tokens] int64; tables as `reference/rope.py` makes them; norm weights
[head_dim]; cache [2 x kv_heads, num_slots, head_dim] in qkv's dtype or e4m3. A slot below zero
stores nothing: rows that only fill up a captured graph have it.

One program holds some heads of one token as two halves; all is float32 and rounded once. Bytes
moved, at e bytes a number and c a cached one: e (2 heads + 2 kv_heads) head_dim and
2 c kv_heads head_dim a token, where norm, turn and store apart move nearly three times that.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917 - a kernel's arguments are flat

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.e4m3 import round_to_e4m3

# Numbers of one program: four warps hold sixteen in each thread.
_NUMBERS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm:
    """RMS norms of each query and each key: weights [head_dim]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What becomes of queries and keys before they meet: norm if any, then rope if any.

    `rope` is ([cos, cos], [-sin, sin]), each [max_positions, 2, head_dim / 2].
    """

    rope: tuple[Tensor, Tensor] | None
    norm: QkNorm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A layer's cache, and each token's slot in it.

    An e4m3 cache takes keys divided by `key_scale` and values divided by `value_scale`.
    """

    cache: Tensor
    slots: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@triton.jit
def rope_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    qkv_stride: int,
    num_slots: int,
    eps: float,
    key_scale: float,
    value_scale: float,
    has_rope: tl.constexpr,
    has_norm: tl.constexpr,
    is_e4m3: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    """`block_heads` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    pair = tl.arange(0, block_half)
    is_query, is_turned = head < num_heads, head < num_heads + num_kv_heads
    is_pair = pair < half
    is_inside = (head < num_heads + 2 * num_kv_heads)[:, None] & is_pair[None, :]
    place = qkv + token * qkv_stride + head[:, None] * (2 * half) + pair[None, :]
    low = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)  # [block_heads, block_half]
    high = tl.load(place + half, mask=is_inside, other=0.0).to(tl.float32)

    if has_norm:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.where(is_turned, tl.rsqrt(squares / (2 * half) + eps), 1.0)[:, None]
        query_low, query_high = _halves(query_weight, pair, is_pair, half)  # [block_half]
        key_low, key_high = _halves(key_weight, pair, is_pair, half)
        low *= scale * _gain(query_low, key_low, is_query, is_turned)
        high *= scale * _gain(query_high, key_high, is_query, is_turned)
    if has_rope:
        at = tl.load(positions + token) * (2 * half)
        # Values are turned by nothing: one and zero.
        is_angle = is_turned[:, None] & is_pair[None, :]
        row = at + tl.zeros((block_heads, 1), tl.int64) + pair[None, :]
        turn = tl.load(cos + row, mask=is_angle, other=1.0).to(tl.float32)
        # The second half of the table has the sine itself, the first its negative.
        lean = tl.load(sin + row + half, mask=is_angle, other=0.0).to(tl.float32)
        low, high = low * turn - high * lean, high * turn + low * lean

    out = query + (token * num_heads + head[:, None]) * (2 * half) + pair[None, :]
    is_out = is_query[:, None] & is_pair[None, :]
    tl.store(out, low, mask=is_out)
    tl.store(out + half, high, mask=is_out)

    slot = tl.load(slots + token)
    is_stored = is_inside & (head >= num_heads)[:, None] & (slot >= 0)
    if is_e4m3:
        inverse = 1.0 / tl.where(is_turned, key_scale, value_scale)[:, None]
        low, high = round_to_e4m3(low * inverse), round_to_e4m3(high * inverse)
    line = (head - num_heads).to(tl.int64)[:, None] * num_slots + slot
    into = cache + line * (2 * half) + pair[None, :]
    tl.store(into, low.to(cache.dtype.element_ty), mask=is_stored)
    tl.store(into + half, high.to(cache.dtype.element_ty), mask=is_stored)


@triton.jit
def _halves(
    weight: tl.tensor, pair: tl.tensor, is_pair: tl.tensor, half: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    low = tl.load(weight + pair, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(weight + half + pair, mask=is_pair, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _gain(query: tl.tensor, key: tl.tensor, is_query: tl.tensor, is_turned: tl.tensor) -> tl.tensor:
    """The weights [block_heads, block_half] of queries, keys and values, which have none."""
    turned = tl.where(is_query[:, None], query[None, :], key[None, :])
    return tl.where(is_turned[:, None], turned, 1.0)


def rope_store(qkv: Tensor, positions: Tensor, turn: Turn, store: Store) -> Tensor:
    """Store the keys and values of qkv's rows, which may lie apart; return their queries.

    These are [tokens, heads, head_dim] in qkv's dtype, turned like the keys.
    """
    kv_heads, num_slots, head_dim = store.cache.shape[0] // 2, *store.cache.shape[1:]
    tokens = len(qkv)
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.shape[1] == (num_heads + 2 * kv_heads) * head_dim, (qkv.shape, store.cache.shape)
    assert num_heads > 0, (qkv.shape, store.cache.shape)
    assert head_dim % 2 == 0, head_dim
    assert qkv.stride(1) == 1, qkv.stride()
    assert positions.shape == store.slots.shape == (tokens,), (positions.shape, store.slots.shape)
    for numbers in (positions, store.slots):
        assert numbers.dtype is torch.int64, numbers.dtype
        assert numbers.is_contiguous(), numbers.stride()
    assert store.cache.is_contiguous(), store.cache.stride()
    assert store.cache.dtype in {qkv.dtype, torch.float8_e4m3fn}, (store.cache.dtype, qkv.dtype)
    query = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    # What is absent is not read; some pointer has to stand for it.
    cos, sin = (qkv, qkv) if turn.rope is None else turn.rope
    for table in (cos, sin) if turn.rope is not None else ():
        assert table.shape[1:] == (2, head_dim // 2), table.shape
        assert table.is_contiguous(), table.stride()
    norm = turn.norm or QkNorm(qkv, qkv, 0.0)
    for weight in (norm.query_weight, norm.key_weight) if turn.norm is not None else ():
        assert weight.shape == (head_dim,), weight.shape
        assert weight.is_contiguous(), weight.stride()
    block_half, block_heads = blocks(num_heads + 2 * kv_heads, head_dim)
    if tokens:
        rope_store_kernel[(tokens, triton.cdiv(num_heads + 2 * kv_heads, block_heads))](
            qkv,
            positions,
            cos,
            sin,
            norm.query_weight,
            norm.key_weight,
            store.slots,
            query,
            store.cache,
            qkv.stride(0),
            num_slots,
            norm.eps,
            store.key_scale,
            store.value_scale,
            has_rope=turn.rope is not None,
            has_norm=turn.norm is not None,
            is_e4m3=store.cache.dtype is torch.float8_e4m3fn,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            half=head_dim // 2,
            block_heads=block_heads,
            block_half=block_half,
            num_warps=4,
        )
    return query


def blocks(all_heads: int, head_dim: int) -> tuple[int, int]:
    """Pairs and heads of one program, as powers of two."""
    block_half = int(triton.next_power_of_2(head_dim // 2))
    wanted = int(triton.next_power_of_2(all_heads))
    return block_half, min(wanted, max(_NUMBERS // (2 * block_half), 1))
