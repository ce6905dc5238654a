"""A converted GGUF is the model it was made from, or it is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.weights.gguf_folder import convert_gguf
from engine.weights.gguf_metadata import GgufNotSupported
from tests.engine.weights.small_gguf import random_weights, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

Kind = gguf.GGMLQuantizationType


def converted(tmp_path: Path, **changes: object) -> Path:
    """The folder made from a small GGUF with the given key-value pairs changed."""
    source, folder = tmp_path / "small.gguf", tmp_path / "model"
    folder.mkdir(exist_ok=True)
    extra = {name.replace("__", "."): value for name, value in changes.items()}
    write_gguf(source, random_weights(is_tied=True), extra=extra)
    convert_gguf(source, folder)
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_unquantised_weights_come_back_exactly_and_in_order(
    kind: Kind, is_tied: bool, tmp_path: Path
) -> None:
    weights = random_weights(is_tied=is_tied)
    write_gguf(tmp_path / "small.gguf", weights, kind)
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(tmp_path / "small.gguf", folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), torch.from_numpy(expected)), name
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is is_tied


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_weights_come_back_within_their_precision(kind: Kind, tmp_path: Path) -> None:
    weights = random_weights(is_tied=True)
    write_gguf(tmp_path / "small.gguf", weights, kind)
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(tmp_path / "small.gguf", folder)
    found = load_file(folder / "model.safetensors")
    for name, expected in weights.items():
        error = (found[name].float() - torch.from_numpy(expected)).abs().max().item()
        assert error <= (0.03 if kind == Kind.Q8_0 else 0.3), name


def test_values_are_rounded_to_nearest_even_as_torch_does(tmp_path: Path) -> None:
    weights = random_weights(is_tied=True)
    rng = np.random.default_rng(1)
    name = "model.embed_tokens.weight"
    weights[name] = rng.standard_normal(weights[name].shape).astype(np.float32)
    # Exactly between two bfloat16 values: the even one is right.
    weights[name][0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-130]
    write_gguf(tmp_path / "small.gguf", weights)
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(tmp_path / "small.gguf", folder)
    found = load_file(folder / "model.safetensors")[name]
    assert torch.equal(found, torch.from_numpy(weights[name]).to(torch.bfloat16))


def test_the_configs_say_what_the_metadata_said(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.vocab_size, config.hidden_size, config.num_key_value_heads) == (263, 64, 2)
    assert (config.rms_norm_eps, config.head_dim, config.max_position_embeddings) == (1e-5, 16, 128)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_tokenizer_has_the_added_tokens_and_the_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(converted(tmp_path))
    assert [token.special for token in tokenizer.added_tokens] == [True, True, True, False]
    assert tokenizer.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.encode_prompt("hell") == (262,)


def test_digits_are_never_merged(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(converted(tmp_path))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode_plain("12")] == [b"1", b"2"]


def test_a_bos_that_the_metadata_asks_for_is_added(tmp_path: Path) -> None:
    folder = converted(tmp_path, tokenizer__ggml__add_bos_token=True)
    assert Tokenizer.from_folder(folder).encode_prompt("hell") == (1, 262)


def test_an_end_of_turn_token_ends_sequences_too(tmp_path: Path) -> None:
    folder = converted(tmp_path, tokenizer__ggml__eot_token_id=0)
    assert Tokenizer.from_folder(folder).eos_token_ids == {2, 0}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (
            "general__architecture",
            "qwen2moe",
            "'qwen2moe' is not converted; supported: llama, qwen2",
        ),
        ("llama__expert_count", 8, "expert_count"),
        ("split__count", 2, "split.count is 2"),
        ("llama__attention__sliding_window", 64, "sliding_window"),
        ("llama__rope__scaling__type", "longrope", "'longrope' is not converted; supported: none"),
        ("llama__rope__scaling__type", "linear", "factor is missing"),
        ("llama__rope__scaling__factor", 2.0, "factor is set"),
        ("llama__rope__scaling__attn_factor", 2.0, "attn_factor is set"),
        ("llama__attention__value_length", 8, "value_length"),
        ("llama__rope__dimension_count", 8, "dimension_count"),
        ("tokenizer__ggml__model", "rwkv", "'rwkv' is not converted; supported: gpt2, llama"),
        ("tokenizer__ggml__model", "llama", "scores is missing"),
        ("tokenizer__ggml__pre", "tekken", "tekken"),
        ("tokenizer__ggml__add_space_prefix", True, "add_space_prefix"),
        ("llama__rope__freq_base", "big", "freq_base is not a number"),
        ("llama__context_length", "long", "context_length is not an integer"),
        ("tokenizer__ggml__token_type", [1, 2, 3], "3 types"),
    ],
)
def test_what_has_no_exact_counterpart_is_refused_by_name(
    key: str, value: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufNotSupported, match=named):
        converted(tmp_path, **{key: value})


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    source, folder = tmp_path / "small.gguf", tmp_path
    weights = random_weights(is_tied=True)
    dropped = weights.pop("model.layers.1.mlp.up_proj.weight")
    write_gguf(source, weights)
    with pytest.raises(GgufNotSupported, match=r"missing: blk\.1\.ffn_up"):
        convert_gguf(source, folder)
    write_gguf(source, {**weights, "model.layers.1.mlp.up_proj.weight": dropped[:32]})
    with pytest.raises(GgufNotSupported, match=r"ffn_up.*shape"):
        convert_gguf(source, folder)
    write_gguf(source, {**weights, "rope_freqs.weight": dropped[:32]})
    with pytest.raises(GgufNotSupported, match=r"rope_freqs.*does not hold Llama 3's"):
        convert_gguf(source, folder)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = random_weights(is_tied=True)
    weights["model.norm.weight"][3] = np.nan
    write_gguf(tmp_path / "small.gguf", weights)
    with pytest.raises(GgufNotSupported, match=r"output_norm\.weight.*not finite"):
        convert_gguf(tmp_path / "small.gguf", tmp_path)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_file_that_is_no_gguf_or_cut_short_is_refused(size: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", random_weights(is_tied=True))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "small.gguf").read_bytes()[:size])
    with pytest.raises(GgufNotSupported, match=r"cut\.gguf"):
        convert_gguf(cut, tmp_path)


def test_the_demo_model_speaks_sense(demo_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(demo_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_folder)
    im_start, im_end = 1, 2
    prompt = [
        im_start,
        *tokenizer.encode_plain("user\nWhat is the capital of France?"),
        im_end,
        *tokenizer.encode_plain("\n"),
        im_start,
        *tokenizer.encode_plain("assistant\n"),
    ]
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    answer = Detokenizer(tokenizer).push(output[0, len(prompt) :].tolist())
    assert "Paris" in answer
