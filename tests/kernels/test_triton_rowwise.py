"""The Triton kernels that treat rows apart: against float64, in Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

from kernels.gelu_mul import gelu_mul
from kernels.logprobs import chosen_logprobs
from kernels.reference import gelu_mul as reference_gelu
from kernels.reference import rms_norm as reference_norm
from kernels.reference import silu_mul as reference_silu
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul
from tests.kernels.closeness import BOUNDS, poisoned, relative_error

DTYPES = [torch.float32, torch.float16]
EPS = 1e-5

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (3, 37), (5, 576), (2, 4097)])
def test_rms_norm_is_that_of_float64(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, hidden).mul(9).to(dtype), torch.randn(hidden).to(dtype)
    with poisoned():
        out = rms_norm(x, weight, EPS)
    assert out.dtype is dtype
    assert relative_error(out, wide_norm(x, weight)) < BOUNDS[dtype]
    expected = reference_norm.rms_norm(x, weight, EPS)
    assert relative_error(out, expected.double()) < BOUNDS[dtype]


def test_rms_norm_reads_rows_that_lie_apart_and_a_wider_weight() -> None:
    x, weight = torch.randn(4, 100).half()[:, 20:73], torch.randn(53)
    assert relative_error(rms_norm(x, weight, EPS), wide_norm(x, weight)) < BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_takes_the_residuals_place_and_is_normalised_as_it_was_rounded(
    dtype: torch.dtype,
) -> None:
    x, residual = torch.randn(5, 333).to(dtype), torch.randn(5, 333).to(dtype)
    weight = torch.randn(333).to(dtype)
    total = x + residual
    with poisoned():
        out = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert relative_error(out, wide_norm(total, weight)) < BOUNDS[dtype]


def test_a_row_with_nan_spoils_no_other() -> None:
    x, weight = torch.randn(3, 65), torch.randn(65)
    x[1, 64] = math.nan
    out = rms_norm(x, weight, EPS)
    assert bool(out[1].isnan().all())
    assert torch.equal(out[::2], rms_norm(x[::2], weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 33), (3, 1024), (2, 1537)])
def test_gated_activations_are_those_of_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * width).mul(4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    with poisoned():
        silu, gelu = silu_mul(gate_up), gelu_mul(gate_up)
    assert relative_error(silu, gate / (1 + (-gate).exp()) * up) < BOUNDS[dtype]
    assert relative_error(gelu, gate / 2 * (1 + inner.tanh()) * up) < BOUNDS[dtype]
    assert relative_error(silu, reference_silu.silu_mul(gate_up).double()) < BOUNDS[dtype]
    assert relative_error(gelu, reference_gelu.gelu_mul(gate_up).double()) < BOUNDS[dtype]


def test_gated_activations_stay_finite_far_from_zero() -> None:
    gate_up = torch.tensor([[-3e4, -100.0, 100.0, 3e4, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 100.0, 3e4]])
    assert torch.allclose(silu_mul(gate_up), expected)
    assert torch.allclose(gelu_mul(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (4, 259), (3, 4097), (2, 9001)])
def test_chosen_logprobs_are_those_of_float64(
    rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(rows, vocab_size).mul(6).to(dtype)
    token_ids = torch.randint(vocab_size, (rows,))
    with poisoned():
        out = chosen_logprobs(logits, token_ids)
    expected = logits.double().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_masked_tokens_count_for_nothing_and_broken_rows_have_no_logprob() -> None:
    logits = torch.randn(5, 5000)
    logits[0, 1:4999] = -math.inf
    logits[1, 7] = math.nan
    logits[2, 4999] = math.inf
    logits[3] = -math.inf
    out = chosen_logprobs(logits, torch.tensor([4999, 0, 0, 0, 3]))
    expected = logits.double().log_softmax(-1)
    assert bool(out[1:4].isnan().all())
    torch.testing.assert_close(out[::4].double(), expected[[0, 4], [4999, 3]], rtol=1e-6, atol=1e-5)


def test_nothing_to_do_is_done() -> None:
    empty = torch.empty(0, 64)
    assert rms_norm(empty, torch.ones(64), EPS).shape == (0, 64)
    assert silu_mul(empty).shape == gelu_mul(empty).shape == (0, 32)
    assert chosen_logprobs(empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
