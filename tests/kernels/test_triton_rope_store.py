"""RoPE, QK-norm and store in one Triton kernel: against float64, in Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

from kernels.reference.rope import apply_rope, rope_tables
from kernels.rope_store import QkNorm, Store, Turn, rope_store
from tests.kernels.closeness import BOUNDS, poisoned, relative_error

TOKENS, NUM_SLOTS, EPS = 5, 24, 1e-6

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layer:
    """Rows of a fused projection that lie apart, and what is to be done with them."""

    def __init__(self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
        self.num_heads, self.kv_heads = heads
        self.all_heads, self.head_dim = self.num_heads + 2 * self.kv_heads, head_dim
        width = self.all_heads * head_dim
        self.qkv = torch.randn(TOKENS, width + 7).mul(3).to(dtype)[:, 3 : width + 3]
        self.positions = torch.tensor([0, 1, 77, 299, 12])
        self.slots = torch.tensor([3, 23, 0, 8, 7])
        self.rope = rope_tables(10_000.0 ** -torch.linspace(0, 1, head_dim // 2), 300, 1.2)
        weights = torch.randn(2, head_dim).to(dtype)
        self.norm = QkNorm(weights[0], weights[1], EPS)
        shape = (2 * self.kv_heads, NUM_SLOTS, head_dim)
        self.cache = torch.full(shape, math.nan, dtype=dtype)

    def expected(self, turn: Turn) -> tuple[Tensor, Tensor]:
        """Queries, and keys with values behind them."""
        x = self.qkv.double().reshape(TOKENS, self.all_heads, self.head_dim)
        turned = self.num_heads + self.kv_heads
        if turn.norm is not None:
            for heads, weight in (
                (slice(0, self.num_heads), turn.norm.query_weight),
                (slice(self.num_heads, turned), turn.norm.key_weight),
            ):
                size = (x[:, heads].square().mean(-1, keepdim=True) + EPS).sqrt()
                x[:, heads] = x[:, heads] / size * weight.double()
        if turn.rope is not None:
            cos, sin = (table[self.positions].double() for table in turn.rope)
            x[:, :turned] = apply_rope(x[:, :turned].contiguous(), cos, sin)
        return x[:, : self.num_heads], x[:, self.num_heads :].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((3, 1), 64), ((2, 2), 80), ((8, 1), 96), ((32, 8), 128), ((5, 5), 6)]
)
@pytest.mark.parametrize(("has_rope", "has_norm"), [(True, False), (True, True), (False, True)])
def test_queries_are_turned_and_the_rest_is_stored_as_in_float64(
    heads: tuple[int, int], head_dim: int, has_rope: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    layer = Layer(heads, head_dim, dtype)
    turn = Turn(layer.rope if has_rope else None, layer.norm if has_norm else None)
    with poisoned():
        query = rope_store(layer.qkv, layer.positions, turn, Store(layer.cache, layer.slots))
    queries, stored = layer.expected(turn)
    assert query.dtype is dtype
    assert relative_error(query, queries) < BOUNDS[dtype]
    assert relative_error(layer.cache[:, layer.slots], stored) < BOUNDS[dtype]
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[layer.slots] = False
    assert bool(layer.cache[:, others].isnan().all())


def test_without_rope_and_norm_numbers_are_only_moved() -> None:
    layer = Layer((3, 1), 16, torch.float16)
    query = rope_store(layer.qkv, layer.positions, Turn(None), Store(layer.cache, layer.slots))
    heads = layer.qkv.reshape(TOKENS, 5, 16)
    assert torch.equal(query, heads[:, :3])
    assert torch.equal(layer.cache[:, layer.slots], heads[:, 3:].transpose(0, 1))


def test_tables_in_the_models_dtype_are_taken_as_they_are() -> None:
    layer = Layer((3, 1), 64, torch.float16)
    cos, sin = layer.rope
    turn = Turn((cos.half(), sin.half()))
    query = rope_store(layer.qkv, layer.positions, turn, Store(layer.cache, layer.slots))
    assert relative_error(query, layer.expected(turn)[0]) < BOUNDS[torch.float16]


def test_a_row_without_a_slot_stores_nothing() -> None:
    layer = Layer((2, 1), 16, torch.float32)
    layer.slots[1] = -1
    query = rope_store(layer.qkv, layer.positions, Turn(None), Store(layer.cache, layer.slots))
    assert bool(query.isfinite().all())
    is_written = layer.cache.isfinite().all(dim=-1).all(dim=0)
    assert is_written.nonzero().flatten().tolist() == [0, 3, 7, 8]


def test_an_e4m3_cache_takes_the_nearest_numbers_and_no_infinity() -> None:
    layer = Layer((2, 2), 32, torch.float32)
    layer.qkv[0, 4 * 32] = 1e9
    cache = torch.zeros(layer.cache.shape).to(torch.float8_e4m3fn)
    store = Store(cache, layer.slots, key_scale=0.25, value_scale=2.0)
    rope_store(layer.qkv, layer.positions, Turn(None), store)
    wide = layer.expected(Turn(None))[1].float()
    wide[:2], wide[2:] = wide[:2] / 0.25, wide[2:] / 2.0
    nearest = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(cache[:, layer.slots].float(), nearest.float())


def test_nothing_to_do_is_done() -> None:
    layer = Layer((2, 1), 16, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    query = rope_store(layer.qkv[:0], none, Turn(layer.rope), Store(layer.cache, none))
    assert query.shape == (0, 2, 16)
