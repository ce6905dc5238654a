"""The GPU benchmark in tiny form, in Triton's interpreter: its model is right, its report whole."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import gpu
from benchmarks.gpu_attention import PagedCache, num_slots
from benchmarks.gpu_kernels import Case, Place
from benchmarks.gpu_model import LINEARS, TritonLlama
from benchmarks.gpu_shape import TINY
from kernels.reference.rope import apply_rope, rope_tables
from tests.kernels.closeness import relative_error

PLACE = Place(torch.device("cpu"), torch.float32)

# The interpreter is numpy, which tells of overflows that GPUs pass over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def product(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight: Tensor = cast(partial[Tensor], linear).keywords["weight"]
    return x @ weight.double().T


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + TINY.eps).sqrt()


def dense_states(model: TritonLlama, token_ids: Tensor) -> Tensor:
    """The last states of one sequence, in float64 and without a cache."""
    heads, kv_heads, tokens = TINY.heads, TINY.kv_heads, len(token_ids)
    frequencies = TINY.rope_theta ** (-torch.arange(0, TINY.head_dim, 2) / TINY.head_dim)
    cos, sin = (table.double() for table in rope_tables(frequencies, tokens))
    x = model.embedding[token_ids].double()
    for layer in model.layers:
        qkv = product(layer.qkv, norm(x)).view(tokens, -1, TINY.head_dim)
        turned = apply_rope(qkv[:, : heads + kv_heads].contiguous(), cos, sin)
        query, key, value = (
            part.transpose(0, 1)[None]
            for part in (turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :])
        )
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + product(layer.attention_out, out[0].transpose(0, 1).reshape(tokens, -1))
        gate, up = product(layer.gate_up, norm(x)).chunk(2, dim=-1)
        x = x + product(layer.down, functional.silu(gate) * up)
    return norm(x)


def test_the_measured_model_is_a_llama() -> None:
    torch.manual_seed(0)
    model = TritonLlama(TINY, PLACE, "bf16", cache := PagedCache(TINY, PLACE, num_slots(2, 8), 8))
    token_ids = torch.randint(TINY.vocab_size, (2, 8))
    stored = model.hidden_states(token_ids[:, :7].flatten(), cache.attention(2, 0, 7))
    added = model.hidden_states(token_ids[:, 7], cache.attention(2, 7, 1))
    states = torch.cat((stored.view(2, 7, -1), added.view(2, 1, -1)), dim=1)
    expected = torch.stack([dense_states(model, row) for row in token_ids])
    assert relative_error(states, expected) < 1e-5


def test_a_tiny_run_checks_every_kernel_and_times_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.run(tmp_path / "gpu.json", is_tiny=True)
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    table = capsys.readouterr().out
    names = {row["name"].split(" [")[0] for row in results["kernels"]}
    assert names >= {
        *("rms_norm", "add_rms_norm", "silu_mul", "gelu_mul", "chosen_logprobs"),
        *("sample greedy", "sample plain", "sample top_p", "sample top_k, top_p"),
        *("int8 quantise", "int8 product", "fp8 quantise", "fp8 product"),
        *("paged_attention 2 x 1 after 19", "paged_attention 1 x 5 after 0"),
        *("rope_store", "copy_blocks 1 of 16 x 16"),
    }
    for row in results["kernels"]:
        assert row["name"] in table
        assert row["numbers"]["error"] <= row["numbers"]["bound"]
        assert row["numbers"]["seconds"] > 0
    sizes = {(row["weights"], row["context"], row["new_tokens"]) for row in results["steps"]}
    assert sizes == {(weights, *size) for weights in LINEARS for size in ((7, 1), (0, 3))}
    assert all(row["numbers"]["eager_s"] > 0 for row in results["steps"])


def test_a_kernel_that_fails_is_a_line_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(plan: gpu.Plan, weights: str) -> TritonLlama:
        raise torch.OutOfMemoryError("no room for 16 GB")

    def one_case(plan: gpu.Plan) -> list[Case]:
        return [Case("broken", lambda: torch.empty(1).view(2), torch.Tensor, 1e-5, 1)]

    monkeypatch.setattr(gpu, "_cases", one_case)
    report = gpu.measure(gpu.tiny_plan(), no_room)
    assert not report.is_right
    assert "RuntimeError" in report.kernels[0].failure
    assert [row.failure for row in report.steps] == ["OutOfMemoryError: no room for 16 GB"] * 3


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gpu.CannotMeasure, match="--tiny"):
        gpu.run()
