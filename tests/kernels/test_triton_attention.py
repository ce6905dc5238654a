"""Paged attention in Triton: against float64 and the reference, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import paged_attention as triton_attention
from kernels.attention_rows import AttentionRows, AttentionShape, attention_rows
from kernels.paged_attention import Look, paged_attention
from kernels.reference import paged_attention as reference
from kernels.tuned_shapes import AttentionTile, Work, num_splits
from tests.kernels.closeness import poisoned, relative_error

CPU = torch.device("cpu")
# Shares of softmax are rounded to the queries' dtype before they meet the values.
BOUNDS = {torch.float32: 1e-6, torch.float16: 1.5e-3}
Rows = list[tuple[int, int]]

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Step:
    """Rows of (position of the first token, tokens) in a cache of NaN, in shuffled blocks."""

    def __init__(self, rows: Rows, shape: AttentionShape, cache_dtype: torch.dtype) -> None:
        self.rows, self.shape = rows, shape
        size = shape.block_size
        blocks = [-(-(start + count) // size) for start, count in rows]
        order = np.random.default_rng(0).permutation(sum(blocks) + 3)
        # Behind a row's own blocks its table names what is not there at all.
        self.tables = np.full((len(rows), max(blocks) + 2), 2**30, dtype=np.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count], order = order[:count], order[count:]
        heads, self.num_blocks = 2 * shape.num_kv_heads, sum(blocks) + 3
        wide = torch.full((heads, self.num_blocks * size, shape.head_dim), torch.nan)
        for row in range(len(rows)):
            slots = self.slots(row)
            wide[:, slots] = torch.randn(heads, len(slots), shape.head_dim)
        self.cache = wide.to(cache_dtype)
        tokens = sum(count for _, count in rows)
        apart = torch.randn(tokens, shape.num_heads + 3, shape.head_dim).to(shape.dtype)
        self.query = apart[:, : shape.num_heads]

    def slots(self, row: int) -> Tensor:
        places = np.arange(sum(self.rows[row]))
        size = self.shape.block_size
        return torch.from_numpy(self.tables[row, places // size].astype(int) * size + places % size)

    def laid_out(self) -> AttentionRows:
        starts, counts = np.array(self.rows).T
        return attention_rows(starts, counts, self.tables, self.shape, CPU)

    def expected(self, look: Look) -> Tensor:
        """Each row alone, in float64."""
        out, first = [], 0
        for row, (start, count) in enumerate(self.rows):
            context = self.cache[:, self.slots(row)].double()
            keys, values = context.view(2, self.shape.num_kv_heads, -1, self.shape.head_dim)
            keys, values = (
                part.repeat_interleave(self.shape.group, dim=0)
                for part in (keys * look.key_scale, values * look.value_scale)
            )
            query = self.query[first : first + count].double().transpose(0, 1)
            scores = query @ keys.transpose(1, 2) * look.scale
            if look.soft_cap is not None:
                scores = torch.tanh(scores / look.soft_cap) * look.soft_cap
            hidden = ~reference.causal_mask(start, count, look.window)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out.append((shares @ values).transpose(0, 1))
            first += count
        return torch.cat(out)


def attend(step: Step, look: Look) -> Tensor:
    with poisoned():
        return paged_attention(step.query, step.cache, step.laid_out(), look)


MIXED: Rows = [(0, 1), (36, 1), (15, 1), (16, 1), (0, 7), (20, 11), (3, 2)]
SINGLE, HALF = torch.float32, torch.float16
ALL, WINDOW, CAPPED = Look(0.125), Look(0.2, window=9), Look(0.3, window=13, soft_cap=1.5)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "look"),
    [
        (2, 2, 64, 16, SINGLE, ALL),
        (2, 2, 64, 16, HALF, CAPPED),
        (6, 2, 80, 4, HALF, ALL),
        (3, 1, 80, 4, SINGLE, CAPPED),
        (4, 1, 96, 16, HALF, WINDOW),
        (8, 1, 128, 4, HALF, ALL),
        (8, 1, 128, 4, HALF, CAPPED),
        (3, 1, 8, 5, SINGLE, WINDOW),
    ],
)
def test_decodes_and_chunks_are_attended_as_in_float64(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    look: Look,
) -> None:
    step = Step(MIXED, AttentionShape(num_heads, num_kv_heads, head_dim, block_size, dtype), dtype)
    assert relative_error(attend(step, look), step.expected(look)) < BOUNDS[dtype]


@pytest.mark.parametrize(("splits", "window"), [(2, None), (2, 1), (8, 190), (8, None)])
def test_a_context_spread_over_programs_is_merged(
    splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attention, "num_splits", lambda *_: splits)
    shape = AttentionShape(3, 1, 16, 16, HALF)
    step = Step([(0, 1), (301, 1), (4, 5), (128, 1), (127, 1)], shape, HALF)
    look = Look(0.25, window)
    assert relative_error(attend(step, look), step.expected(look)) < BOUNDS[HALF]


def test_long_chunks_are_cut_into_tiles_in_half_precision() -> None:
    shape = AttentionShape(3, 1, 32, 16, torch.float16)
    step = Step([(201, 90), (0, 301), (7, 1)], shape, torch.float16)
    for look in (Look(0.2), Look(0.2, window=50)):
        assert relative_error(attend(step, look), step.expected(look)) < BOUNDS[torch.float16]


def test_the_reference_says_the_same() -> None:
    shape = AttentionShape(4, 2, 16, 8, torch.float32)
    step, look = Step([(44, 1), (9, 6)], shape, torch.float32), Look(0.25, soft_cap=20.0)
    out, kv = attend(step, look), 2
    rows = reference.gather_rows(torch.from_numpy(step.tables[:1, :6]), kv, step.num_blocks)
    stored = step.cache.nan_to_num()
    context = reference.gather_kv(stored, rows, 8)
    bias = torch.zeros(kv, 1, 48)
    bias[..., 45:] = -torch.inf
    decoded = reference.attend_decode(step.query[:1], context, bias, 0.25, 20.0)
    chunk = stored[:, step.slots(1)].view(2, kv, 15, 16)
    seen = reference.causal_mask(9, 6)
    attended = reference.attend_chunk(step.query[1:], chunk, seen, 6, 0.25, 20.0)
    torch.testing.assert_close(out, torch.cat((decoded, attended)), rtol=1e-5, atol=1e-6)


def test_an_e4m3_cache_is_read_by_its_scales() -> None:
    shape = AttentionShape(4, 2, 64, 16, torch.float16)
    step = Step([(70, 1), (5, 40)], shape, torch.float8_e4m3fn)
    look = Look(0.125, key_scale=0.7, value_scale=2.5)
    assert relative_error(attend(step, look), step.expected(look)) < BOUNDS[torch.float16]


def test_a_cached_nan_spoils_those_who_see_it_and_nobody_else() -> None:
    shape = AttentionShape(2, 1, 16, 16, torch.float32)
    step = Step([(20, 1), (40, 1), (0, 3)], shape, torch.float32)
    step.cache[:, step.slots(1)[7]] = torch.nan
    out = attend(step, Look(0.25))
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2, 3, 4]].isfinite().all())
    assert bool(attend(step, Look(0.25, window=16)).isfinite().all())


def test_a_row_is_attended_as_it_would_be_alone() -> None:
    shape = AttentionShape(3, 1, 16, 4, torch.float32)
    step = Step([(20, 1), (40, 12), (130, 1)], shape, torch.float32)
    whole, first = attend(step, Look(0.25)), 0
    for row, (_, count) in enumerate(step.rows):
        alone = replace_rows(step, row)
        query = step.query[first : first + count]
        out = paged_attention(query, step.cache, alone, Look(0.25))
        # A lone decode may be spread over more programs: the last bits are those of the sum.
        torch.testing.assert_close(out, whole[first : first + count], rtol=1e-5, atol=1e-6)
        first += count


def replace_rows(step: Step, row: int) -> AttentionRows:
    starts, counts = (np.array([number]) for number in step.rows[row])
    return attention_rows(starts, counts, step.tables[row : row + 1], step.shape, CPU)


def test_tiles_cover_each_token_once_and_begin_with_the_longest_contexts() -> None:
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16)
    starts, counts = np.array([5, 900, 0, 77, 10]), np.array([1, 70, 33, 1, 2])
    rows = attention_rows(starts, counts, np.zeros((5, 70), np.int32), shape, CPU)
    assert rows.decodes.tolist() == [[3, 0], [0, 0]]
    assert rows.chunks.tolist() == [[1, 64], [1, 32], [1, 0], [2, 32], [4, 0], [2, 0]]
    assert (rows.longest, rows.offsets.tolist()) == (78, [0, 1, 71, 104, 105, 107])


def test_few_long_decodes_are_split_and_many_or_short_ones_are_not() -> None:
    tile = AttentionTile(16, 64, 4, 4)
    assert num_splits(tile, 8, 100_000) == 32
    assert num_splits(tile, 64, 100_000) == 4
    assert num_splits(tile, 1000, 100_000) == 1
    assert num_splits(tile, 8, 600) == 2
    assert num_splits(tile, 8, 100) == 1


def test_a_group_wider_than_a_tile_makes_it_higher() -> None:
    shape = AttentionShape(71, 1, 64, 16, torch.bfloat16)
    rows = shape.rows_of(Work.DECODE, shape.tile(Work.DECODE, CPU))
    assert rows == 128
    assert replace(shape, num_heads=3).rows_of(Work.DECODE, shape.tile(Work.DECODE, CPU)) == 16


def test_nothing_to_do_is_done() -> None:
    shape = AttentionShape(2, 1, 16, 16, torch.float32)
    empty = np.zeros(0, dtype=np.int64)
    rows = attention_rows(empty, empty, np.zeros((0, 1), np.int32), shape, CPU)
    out = paged_attention(torch.empty(0, 2, 16), torch.empty(2, 16, 16), rows, Look(1.0))
    assert out.shape == (0, 2, 16)
