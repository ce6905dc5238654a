"""Eight-bit linears: the definitions against float64, and Triton against the definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import fp8_linear as triton_fp8
from kernels import int8_linear as triton_int8
from kernels.matmul_tiles import LARGE, SMALL, num_splits, tile_for
from kernels.reference import fp8_linear as reference_fp8
from kernels.reference import int8_linear as reference_int8
from kernels.scaled_matmul import ScaledMatrix, scaled_matmul
from tests.kernels.closeness import BOUNDS, poisoned, relative_error

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def uneven(rows: int, width: int) -> Tensor:
    """Rows of very different sizes, as activations are."""
    return torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]


def test_int8_is_the_nearest_of_255_steps_of_each_row() -> None:
    x = uneven(5, 301)
    values, scales = reference_int8.quantise_int8(x)
    assert values.dtype is torch.int8
    assert values.abs().amax(dim=-1).tolist() == [127] * 5
    error = (values.double() * scales.double()[:, None] - x).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())


def test_int8_halves_go_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    assert reference_int8.quantise_int8(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]
    assert triton_int8.quantise_int8(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_fp8_is_the_nearest_number_with_three_bits_behind_the_first() -> None:
    x = uneven(5, 301)
    values, scales = reference_fp8.quantise_fp8(x)
    scaled = x.double() / scales.double()[:, None]
    steps = torch.maximum(2.0 ** (scaled.abs().log2().floor() - 3), torch.tensor(2.0**-9))
    assert bool(((values.double() - scaled).abs() <= steps * 0.5001).all())
    assert values.float().abs().amax(dim=-1).tolist() == [448.0] * 5


@pytest.mark.parametrize(
    ("linear", "quantise", "bound"),
    [
        (reference_int8.int8_linear, reference_int8.quantise_int8, 0.015),
        (reference_fp8.fp8_linear, reference_fp8.quantise_fp8, 0.05),
    ],
    ids=["int8", "fp8"],
)
def test_eight_bits_give_nearly_what_the_weights_gave(
    linear: Callable[..., Tensor], quantise: Quantise, bound: float
) -> None:
    x, weight, bias = torch.randn(7, 512), uneven(33, 512), torch.randn(33)
    values, scales = quantise(weight)
    out = linear(x, values, scales, bias)
    # Every channel counts alike, however small its weights are.
    sizes = weight.double().square().mean(dim=-1).sqrt()
    expected = x.double() @ weight.double().T + bias
    assert relative_error(out / sizes, expected / sizes) < bound
    assert linear(x.bfloat16(), values, scales).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 77), (4, 4099)])
def test_triton_quantises_as_the_definitions_do(rows: int, width: int, dtype: torch.dtype) -> None:
    x = uneven(rows, width + 5).to(dtype)[:, 5:]
    with poisoned():
        int8, fp8 = triton_int8.quantise_int8(x), triton_fp8.quantise_fp8(x)
    for ours, expected in (
        (int8, reference_int8.quantise_int8(x)),
        (fp8, reference_fp8.quantise_fp8(x)),
    ):
        assert torch.equal(ours.values.float(), expected[0].float())
        torch.testing.assert_close(ours.scales, expected[1], rtol=1e-6, atol=0)


def test_triton_rounds_to_every_e4m3_number_and_halves_to_even() -> None:
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (every[1:] + every[:-1]) / 2
    x = torch.cat((every, halves, -every, -halves, halves * 1.001, halves * 0.999))[None]
    got = triton_fp8.quantise_fp8(x).values
    assert torch.equal(got.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_stay_zeros_and_a_broken_row_is_broken_alone(name: str) -> None:
    reference, ours, quantise = {
        "int8": (reference_int8.int8_linear, triton_int8.int8_linear, reference_int8.quantise_int8),
        "fp8": (reference_fp8.fp8_linear, triton_fp8.fp8_linear, reference_fp8.quantise_fp8),
    }[name]
    x, (weight, scales) = torch.randn(4, 48), quantise(torch.randn(9, 48))
    x[0] = 0
    sound = reference(x, weight, scales)
    x[1, 5], x[2, 40] = math.nan, -math.inf
    for linear in (reference, ours):
        out = linear(x, weight, scales)
        assert bool((out[0] == 0).all())
        assert not bool(out[1:3].isfinite().any())
        torch.testing.assert_close(out[3], sound[3])


@pytest.mark.parametrize(
    ("rows", "channels", "depth", "has_bias"),
    [
        pytest.param(1, 1, 1, True, id="least"),
        pytest.param(3, 70, 2053, True, id="split"),
        pytest.param(17, 65, 515, False, id="whole"),
        pytest.param(33, 66, 256, True, id="even"),
        pytest.param(65, 66, 144, True, id="described"),
    ],
)
def test_triton_multiplies_as_the_definitions_do(
    rows: int, channels: int, depth: int, has_bias: bool
) -> None:
    x, weight = torch.randn(rows, depth), uneven(channels, depth) / 100
    bias = torch.randn(channels) if has_bias else None
    int8, fp8 = reference_int8.quantise_int8(weight), reference_fp8.quantise_fp8(weight)
    with poisoned():
        ours = triton_int8.int8_linear(x, *int8, bias), triton_fp8.fp8_linear(x, *fp8, bias)
    expected = (
        reference_int8.int8_linear(x, *int8, bias),
        reference_fp8.fp8_linear(x, *fp8, bias),
    )
    for got, want in zip(ours, expected, strict=True):
        assert relative_error(got, want.double()) < BOUNDS[torch.float32]
    half = triton_int8.int8_linear(x.half(), *int8, bias)
    want = reference_int8.int8_linear(x.half(), *int8, bias)
    assert relative_error(half, want.double()) < BOUNDS[torch.float16]


def test_sums_of_int8_are_exact_however_they_are_split() -> None:
    x = torch.randint(-127, 128, (2, 4096)).to(torch.int8)
    weight = torch.randint(-127, 128, (66, 4096)).to(torch.int8)
    weight[0], x[0] = 127, 127
    assert num_splits(tile_for(2, (9, 0)), 2, 66, 4096) > 1
    out = scaled_matmul(
        ScaledMatrix(x, torch.ones(2)), ScaledMatrix(weight, torch.ones(66)), None, torch.float32
    )
    assert torch.equal(out, (x.double() @ weight.double().T).float())


def test_tiles_fit_into_shared_memory() -> None:
    for tiles, limit in ((LARGE, 227 * 1024), (SMALL, 99 * 1024)):
        for _, tile in tiles:
            step = (tile.block_rows + tile.block_channels) * tile.block_depth
            assert step * tile.num_stages <= limit - 1024
        limits = [rows for rows, _ in tiles]
        assert limits[-1] is None
        assert limits[:-1] == sorted(limits[:-1], key=lambda rows: rows or 0)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 256, 5000])
def test_splits_fill_the_gpu_only_where_parts_are_cheap(rows: int) -> None:
    for channels, depth in ((4096, 4096), (28672, 4096), (4096, 14336), (1, 1)):
        tile = tile_for(rows, (9, 0))
        splits = num_splits(tile, rows, channels, depth)
        assert splits >= 1
        if splits > 1:
            assert 8 * rows * splits <= depth / 4
            assert depth >= splits * 4 * tile.block_depth


def test_torch_multiplies_where_it_can_and_rows_are_many() -> None:
    bf16 = torch.bfloat16
    assert triton_fp8.takes_torch((512, 4096), 4096, bf16, (9, 0))
    assert not triton_fp8.takes_torch((8, 4096), 4096, bf16, (9, 0))
    assert not triton_fp8.takes_torch((512, 4096), 4096, bf16, (8, 9))
    assert not triton_fp8.takes_torch((512, 4096), 4096, torch.float16, (9, 0))
    assert not triton_fp8.takes_torch((512, 4100), 4096, bf16, (9, 0))


def test_torchs_own_product_is_the_same() -> None:
    x8, w8 = (ScaledMatrix(*reference_fp8.quantise_fp8(torch.randn(rows, 64))) for rows in (32, 48))
    out = triton_fp8.torch_scaled_matmul(x8, w8, torch.ones(48), torch.bfloat16)
    expected = scaled_matmul(x8, w8, torch.ones(48), torch.float32)
    assert relative_error(out, expected.double()) < BOUNDS[torch.bfloat16]
