"""Each kernel against its formula, written the slow way in float64."""

import math

import pytest
import torch
from torch import Tensor

from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.paged_attention import (
    attend_chunk,
    attend_decode,
    causal_mask,
    gather_kv,
    gather_rows,
    write_kv,
)
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import apply_rope, rope_tables
from kernels.reference.silu_mul import silu_mul

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS, BLOCK_SIZE = 6, 2, 10, 7, 3
SCALE = 1 / math.sqrt(HEAD_DIM)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.randn(5, 37) * 9, torch.randn(37)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float())
    rounded = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected.float(), rtol=0.02, atol=0.02)


def test_rms_norm_multiplies_by_a_wider_weight_before_it_rounds() -> None:
    x, weight = torch.randn(5, 37).bfloat16(), 1 + torch.randn(37) / 1000
    expected = rms_norm(x.float(), weight, 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


def test_gelu_mul_gates_the_second_half_with_the_first() -> None:
    x = torch.randn(5, 2 * 33)
    gate, up = x[:, :33].double(), x[:, 33:].double()
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_mul(x), (gate / 2 * (1 + inner.tanh()) * up).float())


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    x = torch.randn(5, 2 * 33)
    gate, up = x[:, :33].double(), x[:, 33:].double()
    torch.testing.assert_close(silu_mul(x), (gate / (1 + (-gate).exp()) * up).float())


def test_rope_turns_each_pair_of_halves_by_its_angle() -> None:
    x = torch.randn(5, HEADS, HEAD_DIM)
    positions = torch.tensor([0, 1, 7, 30, 99])
    frequencies = 500.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = rope_tables(frequencies, 100, amplitude=1.5)
    turned = apply_rope(x, cos[positions], sin[positions])
    half = HEAD_DIM // 2
    for row, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * 500.0 ** (-2 * i / HEAD_DIM)
            pair = torch.complex(x[row, :, i].double(), x[row, :, i + half].double())
            expected = 1.5 * pair * complex(math.cos(angle), math.sin(angle))
            got = torch.complex(turned[row, :, i].double(), turned[row, :, i + half].double())
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def dense_attention(
    query: Tensor,
    kv: tuple[Tensor, Tensor],
    position: int,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """One query [heads, head_dim] at `position` over two of [tokens, kv_heads, head_dim]."""
    out = []
    seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = kv[0][seen, kv_head].double() @ query[head].double() * SCALE
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        out.append(scores.softmax(0) @ kv[1][seen, kv_head].double())
    return torch.stack(out).float()


def stored(block_table: list[int], length: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Write a random context into its slots, in two parts; return its keys and values."""
    kv = torch.randn(length, 2 * KV_HEADS, HEAD_DIM)
    slots = torch.tensor(
        [block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)]
    )
    write_kv(cache, kv[: length // 2], slots[: length // 2])
    write_kv(cache, kv[length // 2 :], slots[length // 2 :])
    return kv[:, :KV_HEADS], kv[:, KV_HEADS:]


def stale_cache() -> Tensor:
    """A cache full of large leftovers that nobody may see."""
    return torch.full((2 * KV_HEADS, NUM_BLOCKS * BLOCK_SIZE, HEAD_DIM), 1e4)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_decode_attention_sees_exactly_its_own_context(
    window: int | None, cap: float | None
) -> None:
    cache = stale_cache()
    tables, lengths = [[4, 1, 6], [2], [5, 0]], [8, 1, 6]
    contexts = [stored(table, length, cache) for table, length in zip(tables, lengths, strict=True)]
    query = torch.randn(3, HEADS, HEAD_DIM)
    padded = torch.tensor([table + [0] * (3 - len(table)) for table in tables])
    beyond = torch.arange(9) >= torch.tensor(lengths)[:, None]
    if window is not None:
        beyond |= torch.arange(9) < torch.tensor(lengths)[:, None] - window
    bias = torch.zeros(3, 9).masked_fill(beyond, float("-inf"))
    rows = gather_rows(padded, KV_HEADS, NUM_BLOCKS)
    out = attend_decode(
        query,
        gather_kv(cache, rows, BLOCK_SIZE),
        bias.repeat_interleave(KV_HEADS, 0).unsqueeze(1),
        SCALE,
        cap,
    )
    for i, context in enumerate(contexts):
        expected = dense_attention(query[i], context, lengths[i] - 1, window, cap)
        torch.testing.assert_close(out[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("start", "count"), [(0, 8), (0, 2), (3, 5), (7, 1), (5, 3)])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_chunk_attention_is_causal_at_any_offset(
    start: int, count: int, window: int | None, cap: float | None
) -> None:
    cache = stale_cache()
    table = [3, 0, 5]
    kv = stored(table, start + count, cache)
    query = torch.randn(count, HEADS, HEAD_DIM)
    rows = gather_rows(torch.tensor([table]), KV_HEADS, NUM_BLOCKS)
    context = gather_kv(cache, rows, BLOCK_SIZE).view(2, KV_HEADS, -1, HEAD_DIM)
    num_uneven = count if window is None else start + count
    out = attend_chunk(query, context, causal_mask(start, count, window), num_uneven, SCALE, cap)
    for i in range(count):
        expected = dense_attention(query[i], kv, start + i, window, cap)
        torch.testing.assert_close(out[i], expected, rtol=1e-4, atol=1e-4)
