"""What the kernels for CPUs compute of a row is the same to the last bit in any company."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.loader import load_decoder
from kernels.cpu.extension import extension
from tests.engine.states_in_steps import logits_in_steps, states_in_steps
from tests.engine.tiny_models import VOCAB, write_tiny_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(extension() is None, reason="the kernels for CPUs were not built"),
]

NAMES = ("llama 3", "qwen 3 with windows", "gemma 2")


def prompts_of(*lengths: int) -> list[list[int]]:
    chooser = random.Random(6)
    return [[chooser.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_states_are_the_same_to_the_last_bit_however_tokens_are_cut_into_steps(
    name: str, dtype: str, tmp_path: Path
) -> None:
    write_tiny_model(name, tmp_path)
    decoder = load_decoder(tmp_path, dtype)
    prompts = prompts_of(90, 61, 30, 13, 5)
    alone = [states_in_steps(decoder, [prompt], lambda: 1)[0] for prompt in prompts]
    chooser = random.Random(2)
    for sizes in ([1000], [1, 3, 11, 40], [7]):
        together = states_in_steps(decoder, prompts, partial(chooser.choice, sizes))
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("name", NAMES)
def test_int8_is_the_references_int8_and_near_to_bfloat16(name: str, tmp_path: Path) -> None:
    write_tiny_model(name, tmp_path)
    prompts = prompts_of(60, 17)

    def logits(dtype: str, *, has_kernels: bool = True) -> Tensor:
        decoder = load_decoder(tmp_path, dtype, has_kernels=has_kernels)
        return torch.cat(logits_in_steps(decoder, prompts, lambda: 9)).float()

    exact, found = logits("float32"), logits("int8")
    error = (found - exact).norm() / exact.norm()
    assert error < 0.15
    assert error < 1.3 * (logits("int8", has_kernels=False) - exact).norm() / exact.norm()
    assert error > (logits("bfloat16") - exact).norm() / exact.norm()
