"""A decoder of random weights in a small loop: our Triton kernels, torch's matrix products.

The weights lie as the engine's do: q, k and v in one projection, gate and up in another. A step
takes so many sequences with so many tokens stored already, and so many new ones each, and gives
every sequence's next token. What it computes does not depend on what was stored, so nothing is
prefilled before a decode is timed; the tests fill the cache and read the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_attention import Attend, PagedCache
from benchmarks.gpu_kernels import Place, row_settings
from benchmarks.gpu_shape import LlamaShape
from kernels.fp8_linear import fp8_linear
from kernels.int8_linear import int8_linear
from kernels.reference.fp8_linear import quantise_fp8
from kernels.reference.int8_linear import quantise_int8
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sample import sample
from kernels.silu_mul import silu_mul

Linear = Callable[[Tensor], Tensor]
Step = Callable[[], Tensor]


class Model(Protocol):
    """What is timed: the engine's own runner can take this one's place."""

    def step(self, sequences: int, context: int, new_tokens: int) -> Step:
        """A step that may be repeated, and gives one token per sequence, int64 [sequences].

        Everything it needs is prepared: it can be captured as a CUDA graph.
        """

    def least_cost(self, sequences: int, context: int, new_tokens: int) -> tuple[int, int]:
        """Bytes that such a step must read at the least, and operations of its products."""


def plain(weight: Tensor) -> Linear:
    """Torch's own product."""
    return partial(functional.linear, weight=weight)


def in_fp8(weight: Tensor) -> Linear:
    """Weights of one byte, as `fp8_linear` takes them."""
    values, scales = quantise_fp8(weight)
    return partial(fp8_linear, weight=values, weight_scales=scales)


def in_int8(weight: Tensor) -> Linear:
    """Weights of one byte, as `int8_linear` takes them."""
    values, scales = quantise_int8(weight)
    return partial(int8_linear, weight=values, weight_scales=scales)


# What the weights of a layer's products may be; embeddings and scores are always plain.
LINEARS = {"bf16": plain, "fp8": in_fp8, "int8": in_int8}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block."""

    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class TritonLlama:
    """The model; `weights` names one of LINEARS, `cache` keeps and attends."""

    def __init__(self, shape: LlamaShape, place: Place, weights: str, cache: PagedCache) -> None:
        self._shape = shape
        self._place = place
        self._cache = cache
        self._weight_bytes = place.dtype.itemsize if weights == "bf16" else 1
        linear = LINEARS[weights]
        self.embedding = self._matrix(shape.vocab_size, shape.hidden)
        self.lm_head = self._matrix(shape.vocab_size, shape.hidden)
        self.final_norm = self._norm()
        self.layers = [
            Layer(
                self._norm(),
                linear(self._matrix(shape.qkv_width, shape.hidden)),
                linear(self._matrix(shape.hidden, shape.heads * shape.head_dim)),
                self._norm(),
                linear(self._matrix(2 * shape.intermediate, shape.hidden)),
                linear(self._matrix(shape.hidden, shape.intermediate)),
            )
            for _ in range(shape.layers)
        ]

    def step(self, sequences: int, context: int, new_tokens: int) -> Step:
        """See `Model`."""
        device, shape = self._place.device, self._shape
        token_ids = torch.randint(shape.vocab_size, (sequences * new_tokens,), device=device)
        settings = row_settings(sequences, device)
        attend = self._cache.attention(sequences, context, new_tokens)

        def run() -> Tensor:
            hidden = self.hidden_states(token_ids, attend)
            # The last new token of each sequence is the one that is followed.
            last = hidden.view(sequences, new_tokens, -1)[:, -1]
            return sample(functional.linear(last, self.lm_head), settings)

        return run

    def least_cost(self, sequences: int, context: int, new_tokens: int) -> tuple[int, int]:
        """See `Model`."""
        shape, size = self._shape, self._place.dtype.itemsize
        in_layers = shape.layers * shape.weights_per_layer
        stored = shape.layers * shape.kv_width * (context + new_tokens)
        scores = shape.vocab_size * shape.hidden
        num_bytes = self._weight_bytes * in_layers + size * (scores + sequences * stored)
        # Each new token sees what was stored, itself, and half of the new ones before it.
        seen = context + (new_tokens + 1) // 2
        attended = 4 * shape.layers * shape.heads * shape.head_dim * seen
        operations = sequences * (new_tokens * (2 * in_layers + attended) + 2 * scores)
        return num_bytes, operations

    def hidden_states(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Normalised states [tokens, hidden]; each addition is fused with the norm behind it."""
        eps = self._shape.eps
        residual = functional.embedding(token_ids, self.embedding)
        hidden = rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for number, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            out = layer.attention_out(attend(number, layer.qkv(hidden)))
            hidden = add_rms_norm(out, residual, layer.mlp_norm, eps)
            out = layer.down(silu_mul(layer.gate_up(hidden)))
            hidden = add_rms_norm(out, residual, next_norm, eps)
        return hidden

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        return self._place.normal(outputs, inputs).mul_(inputs**-0.5)

    def _norm(self) -> Tensor:
        return torch.ones(self._shape.hidden, dtype=self._place.dtype, device=self._place.device)
