"""The kernels for CPUs do what the reference does, on every instruction set that is here.

What they compute of a row is the same to the last bit whatever is computed beside it.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.cpu.extension import extension
from kernels.reference.gumbel_noise import gumbel_noise, noise_keys
from kernels.reference.int8_linear import int8_linear, quantise_int8
from kernels.reference.sample import RowSettings
from kernels.reference.sample import sample as sample_by_torch

if extension() is None:
    pytest.skip("the kernels for CPUs were not built", allow_module_level=True)

from kernels.cpu import native

SETS = native.instruction_sets()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
# Rounding of what comes in is the reference's too; this is what adding up may cost.
ERRORS = {"float32": 1e-6, "bfloat16": 1e-6, "int8": 4e-3}
SHAPES = [(1, 576, 96), (3, 64, 32), (7, 130, 100), (12, 37, 33), (25, 1536, 64), (300, 40, 70)]


def rms_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_projection_is_the_references_and_a_rows_alone_is_the_same(
    shape: tuple[int, int, int], kind: str, instruction_set: str
) -> None:
    rows, inputs, outputs = shape
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs).to(DTYPES[kind])
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(DTYPES[kind])
    bias = torch.randn(outputs)
    found = native.linear(native.PackedLinear(weight, bias, kind), x, instruction_set)
    if kind == "int8":
        exact = int8_linear(x, *quantise_int8(weight), bias, 64).double()
    else:
        exact = x.double() @ weight.double().T + bias
    assert rms_error(found, exact) < ERRORS[kind]
    packed = native.PackedLinear(weight, bias, kind)
    for row in {0, rows // 2, rows - 1}:
        alone = native.linear(packed, x[row : row + 1].contiguous(), instruction_set)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("width", [16, 24, 100])
def test_a_gated_projection_is_activated_and_multiplied(width: int, instruction_set: str) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(9, 48), torch.randn(2 * width, 48)
    found = native.linear(native.PackedLinear(weight, None, "float32", True), x, instruction_set)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert rms_error(found, torch.nn.functional.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", DTYPES)
def test_a_row_with_a_number_that_is_none_spoils_no_other(kind: str, bad: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(14, 128).to(DTYPES[kind])
    packed = native.PackedLinear(torch.randn(64, 128).to(DTYPES[kind]), None, kind)
    sound = native.linear(packed, x)
    x[5, 77] = bad
    found = native.linear(packed, x)
    others = torch.arange(14) != 5
    assert torch.equal(found[others], sound[others])
    assert not found[5].isfinite().any()


@dataclass(frozen=True)
class Look:
    """One layer's attention, and rows of (tokens before, tokens now)."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    rows: tuple[tuple[int, int], ...] = ((0, 5), (63, 1), (64, 1), (100, 30), (1, 1))


LOOKS = {
    "plain": Look(),
    "small blocks": Look(block_size=4),
    "odd blocks": Look(block_size=5, head_dim=24),
    "wide blocks": Look(block_size=32),
    "one head each": Look(num_heads=2, head_dim=80),
    "eight heads each": Look(num_heads=8, num_kv_heads=1, head_dim=96),
    "more heads than a tile": Look(num_heads=60, num_kv_heads=1, head_dim=8),
    "window": Look(window=20, rows=((0, 90), (70, 1), (200, 3), (500, 40))),
    "window over parts": Look(window=600, rows=((1300, 1), (1100, 70))),
    "soft cap": Look(soft_cap=5.0),
    "long": Look(rows=((1300, 1), (511, 2), (512, 1), (1000, 50), (0, 200))),
}


@dataclass(frozen=True)
class Case:
    """Queries, keys and values [tokens, heads, head_dim] of whole sequences, and their cache."""

    look: Look
    dtype: torch.dtype
    sequences: list[Tensor]
    caches: Tensor
    tables: Tensor

    def run(self, rows: list[tuple[int, int, int]], instruction_set: str = "") -> Tensor:
        """Attend rows of (sequence, tokens before, tokens now) in one step."""
        look = self.look
        tables = self.tables[[row for row, _, _ in rows]].contiguous()
        positions = [torch.arange(start, start + count) for _, start, count in rows]
        slots = [
            tables[i][p // look.block_size].long() * look.block_size + p % look.block_size
            for i, p in enumerate(positions)
        ]
        step = native.Step(
            torch.zeros(sum(count for _, _, count in rows), dtype=torch.int64),
            torch.cat(positions),
            torch.cat(slots),
            torch.tensor([start for _, start, _ in rows]),
            torch.tensor([0] + [count for _, _, count in rows]).cumsum(0),
            tables,
        )
        qkv = torch.cat(
            [self.sequences[row][start : start + count] for row, start, count in rows]
        ).flatten(1)
        return decoder(look, self.dtype, instruction_set).attention(
            qkv.contiguous(), step, self.caches, look.block_size
        )


def decoder(look: Look, dtype: torch.dtype, instruction_set: str) -> native.Decoder:
    width = look.num_heads * look.head_dim
    all_heads = width + 2 * look.num_kv_heads * look.head_dim
    kind = str(dtype).removeprefix("torch.")

    def packed(outputs: int, inputs: int, is_gated: bool = False) -> object:
        return native.PackedLinear(torch.zeros(outputs, inputs, dtype=dtype), None, kind, is_gated)

    layer = {
        "input_norm": torch.ones(8),
        "qkv": packed(all_heads, 8),
        "query_norm": None,
        "key_norm": None,
        "attention_out": packed(8, width),
        "attention_out_norm": None,
        "mlp_norm": torch.ones(8),
        "gate_up": packed(16, 8, True),
        "down": packed(8, 8),
        "mlp_out_norm": None,
        "scale": look.head_dim**-0.5,
        "window": look.window,
        "soft_cap": look.soft_cap,
        "rope": -1,
    }
    shape: dict[str, int | float | str] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": look.num_heads,
        "num_kv_heads": look.num_kv_heads,
        "head_dim": look.head_dim,
        "eps": 1e-6,
        "embedding_scale": 1.0,
        "logit_soft_cap": 0.0,
        "activation": "silu",
    }
    embedding = torch.zeros(2, 8, dtype=dtype)
    return native.Decoder(shape, embedding, torch.ones(8), [], [layer], instruction_set)


def case_of(look: Look, dtype: torch.dtype) -> Case:
    torch.manual_seed(7)
    heads = look.num_heads + 2 * look.num_kv_heads
    lengths = [start + count for start, count in look.rows]
    width = -(-max(lengths) // look.block_size)
    num_blocks = width * len(lengths) + 3
    tables = torch.randperm(num_blocks)[: width * len(lengths)].view(len(lengths), width).int()
    sequences = [torch.randn(length, heads, look.head_dim).to(dtype).float() for length in lengths]
    slots = num_blocks * look.block_size
    # What others left, which nobody may see.
    caches = torch.full((1, 2 * look.num_kv_heads, slots, look.head_dim), 30.0, dtype=dtype)
    return Case(look, dtype, sequences, caches, tables)


def exact_attention(look: Look, sequence: Tensor, start: int) -> Tensor:
    """By float64, the outputs [tokens, heads x head_dim] from position `start` on."""
    wide, num_heads, num_turned = (
        sequence.double(),
        look.num_heads,
        look.num_heads + look.num_kv_heads,
    )
    query, key, value = wide[:, :num_heads], wide[:, num_heads:num_turned], wide[:, num_turned:]
    group = look.num_heads // look.num_kv_heads
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * look.head_dim**-0.5
    if look.soft_cap:
        scores = torch.tanh(scores / look.soft_cap) * look.soft_cap
    places = torch.arange(len(sequence))
    hidden = places > places[:, None]
    if look.window:
        hidden |= places <= places[:, None] - look.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)[start:]


def before_and_now(look: Look) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    before = [(i, 0, start) for i, (start, _) in enumerate(look.rows) if start]
    return before, [(i, start, count) for i, (start, count) in enumerate(look.rows)]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", LOOKS)
def test_attention_over_blocks_is_that_of_float64(name: str, instruction_set: str) -> None:
    look = LOOKS[name]
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        case = case_of(look, dtype)
        before, now = before_and_now(look)
        case.run(before, instruction_set)
        found = case.run(now, instruction_set)
        exact = torch.cat([exact_attention(look, case.sequences[i], s) for i, s, _ in now])
        assert rms_error(found, exact) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "long", "window over parts", "small blocks"])
def test_attention_is_the_same_to_the_last_bit_however_it_is_cut_into_steps(
    name: str, dtype: torch.dtype
) -> None:
    look = LOOKS[name]
    whole, cut = case_of(look, dtype), case_of(look, dtype)
    before, now = before_and_now(look)
    whole.run(before)
    together = whole.run(now)
    for i, _, count in before:
        for start in range(0, count, 97):
            cut.run([(i, start, min(97, count - start))])
    alone = [cut.run([(i, p, 1)]) for i, start, count in now for p in range(start, start + count)]
    assert torch.equal(torch.cat(alone), together)


def settings(rows: int, **given: float) -> RowSettings:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), given.get(name, default), dtype=dtype)

    return RowSettings(
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        torch.arange(rows) * 2**33 + 5,
        torch.arange(rows) % 3,
        torch.arange(rows) + 7,
    )


def sample(scores: Tensor, chosen: RowSettings, instruction_set: str) -> Tensor:
    fields = [getattr(chosen, name) for name in RowSettings.__slots__]
    token_ids: Tensor = native.sample(scores, fields, instruction_set)
    return token_ids


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.05},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_the_reference_draws_them(
    given: dict[str, float], instruction_set: str
) -> None:
    torch.manual_seed(2)
    scores = torch.randn(60, 1003) * 3
    chosen = settings(60, **given)
    assert torch.equal(sample(scores, chosen, instruction_set), sample_by_torch(scores, chosen))


@pytest.mark.parametrize("instruction_set", SETS)
def test_the_first_of_equals_is_taken_and_a_broken_row_has_no_token(instruction_set: str) -> None:
    scores = torch.zeros(6, 50)
    scores[0, [33, 40]] = 2.0
    scores[1, 49] = 1.0
    scores[2, 7] = math.nan
    scores[3, 48] = math.inf
    scores[4] = -math.inf
    scores[5, :] = -math.inf
    scores[5, 20] = -5.0
    for temperature, first in ((0.0, 33), (1e-6, None)):
        found = sample(scores, settings(6, temperature=temperature), instruction_set).tolist()
        assert found[1:] == [49, -1, -1, -1, 20]
        assert found[0] in (33, 40)
        assert first is None or found[0] == first


@pytest.mark.parametrize("instruction_set", SETS)
def test_ranges_of_the_noise_are_the_references(instruction_set: str) -> None:
    """With scores that differ by less than noise does, the draw is the noise's largest."""
    chosen = settings(400)
    scores = torch.zeros(400, 257)
    keys = noise_keys(chosen.seed, chosen.choice, chosen.position)
    expected = gumbel_noise(keys, 257).argmax(dim=-1)
    assert torch.equal(sample(scores, chosen, instruction_set), expected)


@pytest.mark.parametrize("block_size", [4, 16])
def test_wiping_a_slot_zeroes_its_token_and_nothing_else(block_size: int) -> None:
    look = Look(block_size=block_size, rows=((0, 40), (0, 40)))
    case = case_of(look, torch.bfloat16)
    case.caches.fill_(1.0)
    slots = torch.tensor([3, 21, 22])
    native.wipe(case.caches, block_size, slots)
    numbers = 2 * look.num_kv_heads * look.head_dim
    assert int((case.caches == 0).sum()) == len(slots) * numbers
    case.caches.fill_(1.0)
    case.run([(0, 0, 40), (1, 0, 40)])
    used = (case.tables[:, : -(-40 // block_size)].flatten()[:, None] * block_size) + torch.arange(
        block_size
    )
    native.wipe(case.caches, block_size, used.flatten().long())
    assert set(case.caches.flatten().float().tolist()) <= {0.0, 1.0}
