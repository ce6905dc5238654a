"""Every Triton kernel at the shapes of a model: what it must give, move and compute.

Results are held against float64 (relative RMS error); tokens against the definition's (share of
rows with another one). Against the clock, a kernel is held to what it must move and compute at
the least.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_shape import LlamaShape
from kernels.fp8_linear import quantise_fp8, torch_scaled_matmul
from kernels.gelu_mul import gelu_mul
from kernels.int8_linear import quantise_int8
from kernels.logprobs import chosen_logprobs
from kernels.reference import fp8_linear as reference_fp8
from kernels.reference import int8_linear as reference_int8
from kernels.reference.sample import RowSettings
from kernels.reference.sample import sample as reference_sample
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sample import sample
from kernels.scaled_matmul import HOPPER, ScaledMatrix, scaled_matmul
from kernels.silu_mul import silu_mul

# Relative RMS errors of results that were rounded once to these dtypes.
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Sums in another order may put a token on the other side of a threshold.
_OTHER_TOKENS = 0.005
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape, which gives `expected` to within `bound`.

    It moves `num_bytes` and computes `num_operations` of the kind `unit`, at the least. What is
    timed is `timed`, or `run` if checking needs nothing more than running.
    """

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    bound: float
    num_bytes: int
    num_operations: int = 0
    unit: str = "bf16"
    timed: Callable[[], object] | None = None

    def error(self) -> float:
        """How far the kernel is from what it must give."""
        got, expected = self.run(), self.expected()
        if not got.is_floating_point():
            return float((got != expected).double().mean())
        difference = (got.double() - expected).square().mean().sqrt()
        return float(difference / expected.square().mean().sqrt())


@dataclass(frozen=True, slots=True)
class Place:
    """Where numbers lie and how wide they are."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's, or that of a Hopper where there is none."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_capability(self.device) if is_gpu else HOPPER


def rowwise_cases(shape: LlamaShape, rows: int, place: Place) -> Iterator[Case]:
    """Norms and activations of so many rows."""
    hidden, width, size = shape.hidden, shape.intermediate, place.dtype.itemsize
    x, weight = place.normal(rows, hidden), place.normal(hidden)
    bound = BOUNDS[place.dtype]
    yield Case(
        f"rms_norm [{rows}, {hidden}]",
        partial(rms_norm, x, weight, _EPS),
        partial(_norm, x, weight),
        bound,
        2 * size * rows * hidden,
    )
    # What is added again and again is nothing, so that the sum stays what is expected; that it
    # is a sum shows in the model.
    residual, nothing = place.normal(rows, hidden), torch.zeros_like(x)
    yield Case(
        f"add_rms_norm [{rows}, {hidden}]",
        partial(add_rms_norm, nothing, residual, weight, _EPS),
        partial(_norm, residual, weight),
        bound,
        4 * size * rows * hidden,
    )
    gate_up = place.normal(rows, 2 * width)
    for name, kernel, activation in (
        ("silu_mul", silu_mul, functional.silu),
        ("gelu_mul", gelu_mul, partial(functional.gelu, approximate="tanh")),
    ):
        yield Case(
            f"{name} [{rows}, 2 x {width}]",
            partial(kernel, gate_up),
            partial(_gated, activation, gate_up),
            bound,
            3 * size * rows * width,
        )


def sampling_cases(shape: LlamaShape, rows: int, place: Place) -> Iterator[Case]:
    """Drawing tokens, greedily, from all and from some, and how likely they were."""
    vocab_size = shape.vocab_size
    logits = place.normal(rows, vocab_size) * 3
    once = place.dtype.itemsize * rows * vocab_size
    for name, settings in (
        ("greedy", row_settings(rows, place.device, temperature=0.0)),
        ("plain", row_settings(rows, place.device)),
        ("top_p", row_settings(rows, place.device, top_p=0.95)),
        ("top_k, top_p", row_settings(rows, place.device, top_k=20, top_p=0.95)),
    ):
        yield Case(
            f"sample {name} [{rows}, {vocab_size}]",
            partial(sample, logits, settings),
            partial(reference_sample, logits, settings),
            _OTHER_TOKENS,
            once,
        )
    token_ids = torch.randint(vocab_size, (rows,), device=place.device)
    yield Case(
        f"chosen_logprobs [{rows}, {vocab_size}]",
        partial(chosen_logprobs, logits, token_ids),
        partial(_logprobs, logits, token_ids),
        BOUNDS[torch.float32],
        once,
    )


def linear_cases(shape: LlamaShape, rows: int, place: Place) -> Iterator[Case]:
    """Eight-bit products of the largest projection, and what quantising their input costs."""
    channels, depth, size = 2 * shape.intermediate, shape.hidden, place.dtype.itemsize
    x, weight = place.normal(rows, depth), place.normal(channels, depth)
    units = {
        "int8": (quantise_int8, reference_int8.quantise_int8, 0.02),
        "fp8": (quantise_fp8, reference_fp8.quantise_fp8, 0.04),
    }
    if place.capability < (8, 9):
        del units["fp8"]
    for unit, (quantise, quantise_weight, bound) in units.items():
        yield Case(
            f"{unit} quantise [{rows}, {depth}]",
            partial(_there_and_back, quantise, x),
            x.double,
            bound,
            (size + 1) * rows * depth,
            timed=partial(quantise, x),
        )
        products: dict[str, Callable[..., Tensor]] = {"": scaled_matmul}
        if unit == "fp8" and place.device.type == "cuda" and place.capability >= HOPPER:
            products[" by torch"] = torch_scaled_matmul
        x8, w8 = quantise(x), ScaledMatrix(*quantise_weight(weight))
        for origin, product in products.items():
            yield Case(
                f"{unit} product{origin} [{rows}, {depth}] x [{channels}, {depth}]",
                partial(product, x8, w8, None, place.dtype),
                partial(_product, x8, w8),
                BOUNDS[place.dtype],
                channels * depth + rows * depth + size * rows * channels,
                2 * rows * channels * depth,
                unit,
            )


def row_settings(
    rows: int,
    device: torch.device,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> RowSettings:
    """The same settings for every row, with noise of its own."""
    numbers = torch.arange(rows, device=device)
    ones = torch.ones(rows, device=device)
    return RowSettings(
        temperature=ones * temperature,
        top_k=torch.full_like(numbers, top_k),
        top_p=ones * top_p,
        min_p=ones * 0,
        seed=numbers * 2**32 + 7,
        choice=numbers * 0,
        position=numbers + 100,
    )


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight.double()


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return activation(gate) * up


def _logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def _there_and_back(quantise: Callable[[Tensor], ScaledMatrix], x: Tensor) -> Tensor:
    quantised = quantise(x)
    return quantised.values.float() * quantised.scales[:, None]


def _product(x: ScaledMatrix, weight: ScaledMatrix) -> Tensor:
    sums = x.values.double() @ weight.values.double().T
    return sums * x.scales.double()[:, None] * weight.scales.double()
