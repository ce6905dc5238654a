"""Every family's logits are those of transformers, however the tokens are cut into steps."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.layers.shard import Shard
from engine.models.config_file import UnsupportedModel
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from tests.engine.meeting_threads import on_ranks
from tests.engine.oracle import engine_words_alone, engine_words_together, oracle_words
from tests.engine.states_in_steps import all_logits, logits_in_steps, states_in_steps
from tests.engine.tiny_models import MAX_POSITIONS, TINY_MODELS, VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (MAX_POSITIONS, 61, 19, 5)


@dataclass
class Case:
    folder: Path
    has_kernels: bool
    decoder: Decoder
    prompts: list[list[int]]
    expected: list[Tensor]


@pytest.fixture(scope="module", params=TINY_MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = write_tiny_model(request.param, folder)
    chooser = random.Random(3)
    prompts = [[chooser.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Case(folder, True, load_decoder(folder, "float32"), prompts, expected)


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "torch"])
def case(request: pytest.FixtureRequest, model: Case) -> Case:
    if request.param:
        return model
    decoder = load_decoder(model.folder, "float32", has_kernels=False)
    return replace(model, has_kernels=False, decoder=decoder)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 1, "logits near zero prove little"
        assert (ours - theirs).abs().max() <= 1e-4


def test_whole_prompts_have_the_logits_of_transformers(case: Case) -> None:
    assert_equal(logits_in_steps(case.decoder, case.prompts, lambda: 1000), case.expected)


def test_chunks_of_any_size_have_the_logits_of_transformers(case: Case) -> None:
    chooser = random.Random(9)
    sizes = [1, 1, 2, 7, 16, 30]
    found = logits_in_steps(case.decoder, case.prompts, lambda: chooser.choice(sizes))
    assert_equal(found, case.expected)


def test_decoding_token_by_token_has_the_logits_of_transformers(case: Case) -> None:
    prompts, expected = case.prompts[1:], case.expected[1:]
    assert_equal(logits_in_steps(case.decoder, prompts, lambda: 1), expected)


def assert_ranks_have_the_logits(case: Case, num_ranks: int) -> None:
    def states(shard: Shard) -> tuple[Decoder, list[Tensor]]:
        chooser = random.Random(9)
        decoder = load_decoder(case.folder, "float32", shard, has_kernels=case.has_kernels)
        return decoder, states_in_steps(decoder, case.prompts, lambda: chooser.choice([1, 7, 40]))

    (first, found), *others = on_ranks(num_ranks, states)
    with torch.inference_mode():
        assert_equal([all_logits(first, state) for state in found], case.expected)
    for _, equal in others:
        assert all(map(torch.equal, found, equal)), "ranks disagree"


def test_two_ranks_have_the_logits_of_transformers_and_equal_states(case: Case) -> None:
    assert_ranks_have_the_logits(case, 2)


def test_as_many_ranks_as_kv_heads_have_the_logits_of_transformers(case: Case) -> None:
    num_kv_heads = case.decoder.description.num_kv_heads
    if num_kv_heads > 2:
        assert_ranks_have_the_logits(case, num_kv_heads)
    with pytest.raises(UnsupportedModel, match=f"Use at most {num_kv_heads} ranks"):
        load_decoder(case.folder, "float32", Shard(0, num_kv_heads + 1))


@pytest.mark.parametrize("name", ["mistral", "smollm 3 with windows", "gemma 3"])
def test_greedy_words_far_beyond_the_window_are_those_of_transformers_in_any_company(
    name: str, tmp_path: Path
) -> None:
    write_tiny_model(name, tmp_path)
    chooser = random.Random(4)
    prompts = [
        tuple(chooser.randrange(3, VOCAB) for _ in range(length)) for length in (3, 22, 60, 120)
    ]
    expected = oracle_words(tmp_path, prompts, 20)
    assert engine_words_alone(tmp_path, prompts, 20) == expected
    assert engine_words_together(tmp_path, prompts, 20, join_at=[5, 0, 2, 1]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sharded_checkpoints_of_any_float_type_load_as_transformers_wrote_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    write_tiny_model("llama 3", tmp_path, dtype=dtype, max_shard_size="40KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    prompt = list(range(3, 40))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    found = logits_in_steps(load_decoder(tmp_path, "float32"), [prompt], lambda: 11)
    assert_equal(found, [expected])


def test_a_model_whose_shard_is_missing_never_loads(tmp_path: Path) -> None:
    write_tiny_model("llama 3", tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UnsupportedModel, match=f"{shard.name} is missing"):
        load_decoder(tmp_path, "float32")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama 3", "qwen 3 with windows", "gemma 2"])
def test_bfloat16_stays_as_near_to_float32_as_in_transformers(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    model = write_tiny_model(name, tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    prompt = list(range(3, 80))
    with torch.inference_mode():
        exact, theirs = (m(torch.tensor([prompt])).logits[0].float() for m in (model, rounded))

    def states(shard: Shard) -> tuple[Decoder, list[Tensor]]:
        decoder = load_decoder(tmp_path, "bfloat16", shard)
        return decoder, states_in_steps(decoder, [prompt], lambda: 9)

    first, (state,) = on_ranks(num_ranks, states)[0]
    with torch.inference_mode():
        ours = all_logits(first, state)
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()
