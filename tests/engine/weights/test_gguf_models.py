"""A model that went through GGUF computes what transformers computed before."""

import random
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.description import read_description
from engine.models.loader import load_decoder
from engine.models.rope_description import LinearRope, Llama3Rope, YarnRope
from engine.text.tokenizer import Tokenizer
from engine.weights.gguf_folder import convert_gguf
from engine.weights.gguf_metadata import GgufNotSupported
from tests.engine.states_in_steps import logits_in_steps
from tests.engine.test_model_families import assert_equal
from tests.engine.weights.small_gguf import (
    HIDDEN,
    TOKENS,
    Packed,
    Weights,
    random_weights,
    write_gguf,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Kind = gguf.GGMLQuantizationType

SIZES: dict[str, object] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "rope_theta": 100000.0,
}


def folder_of(
    tmp_path: Path,
    weights: Weights,
    extra: Mapping[str, object] | None = None,
    packed: Packed | None = None,
) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    write_gguf(tmp_path / "tiny.gguf", weights, extra=extra, packed=packed)
    convert_gguf(tmp_path / "tiny.gguf", folder)
    return folder


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
        (
            Qwen2Config(**SIZES),
            {"general.architecture": "qwen2", "tokenizer.ggml.pre": "qwen2"},
        ),
        (
            Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
            {
                "general.architecture": "qwen3",
                "tokenizer.ggml.pre": "qwen2",
                "qwen3.attention.key_length": 24,
                "qwen3.attention.value_length": 24,
                "qwen3.rope.dimension_count": 24,
            },
        ),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_each_architecture_computes_what_it_did_before_it_was_a_gguf(
    config: PreTrainedConfig, extra: dict[str, object], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        parameter.copy_(parameter.bfloat16().float())
    weights = {name: p.numpy() for name, p in model.named_parameters()}
    decoder = load_decoder(folder_of(tmp_path, weights, extra), "float32")
    prompt = [random.Random(1).randrange(len(TOKENS)) for _ in range(50)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    assert_equal(logits_in_steps(decoder, [prompt], lambda: 13), [expected])


@pytest.mark.parametrize(
    ("kind", "scale_ends"),
    [
        # The last byte of each float16 scale in a block.
        (Kind.Q2_K, (81, 83)),
        (Kind.Q3_K, (109,)),
        (Kind.Q4_K, (1, 3)),
        (Kind.Q5_K, (1, 3)),
        (Kind.Q6_K, (209,)),
    ],
)
def test_k_quants_are_computed_back(
    kind: Kind, scale_ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Blocks of random bytes with small finite scales, since nothing here can write K-quants."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (HIDDEN, size), dtype=np.uint8)
    blocks[:, scale_ends] = 0x1A
    weights = random_weights(is_tied=True, inner=length)
    del weights["model.layers.1.mlp.down_proj.weight"]
    folder = folder_of(
        tmp_path,
        weights,
        {"llama.feed_forward_length": length},
        {"blk.1.ffn_down.weight": (blocks, kind)},
    )
    found = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    assert len(torch.unique(found)) > 100
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_a_kind_that_nobody_can_compute_back_is_refused_by_name(tmp_path: Path) -> None:
    weights = random_weights(is_tied=True)
    rows = weights.pop("model.layers.1.mlp.down_proj.weight").astype(np.int8)
    with pytest.raises(GgufNotSupported, match=r"blk\.1\.ffn_down\.weight' has type I8"):
        folder_of(
            tmp_path, weights, packed={"blk.1.ffn_down.weight": (rows.view(np.uint8), Kind.I8)}
        )


def test_rope_scaling_is_told_in_the_words_of_config_json(tmp_path: Path) -> None:
    weights = random_weights(is_tied=True)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = folder_of(tmp_path, weights, linear)
    assert read_description(folder).ropes == (LinearRope(100000.0, 4.0),)
    yarn = {**linear, "llama.rope.scaling.type": "yarn"}
    yarn["llama.rope.scaling.original_context_length"] = 32
    (rope,) = read_description(folder_of(tmp_path, weights, yarn)).ropes
    assert isinstance(rope, YarnRope)
    assert (rope.factor, rope.original_positions) == (4.0, 32)


def test_llama_3s_rope_divisors_are_recognised_and_no_others(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    plain = 100000.0 ** -(torch.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    weights = random_weights(is_tied=True)
    weights["rope_freqs.weight"] = (plain / scaled).numpy()
    (rope,) = read_description(folder_of(tmp_path, weights)).ropes
    assert rope == Llama3Rope(100000.0, 32.0, 1.0, 4.0, 8192)
    weights["rope_freqs.weight"][3] *= 1.01
    with pytest.raises(GgufNotSupported, match="Llama 3's"):
        folder_of(tmp_path, weights)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "qwen2",
            "He'll pay 12,  ok?\n\n",
            ["He", "'ll", " pay", " ", "1", "2", ",", " ", " ok", "?\n\n"],
        ),
        ("llama-bpe", "In 12345 days", ["In", " ", "123", "45", " days"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(
    pre: str, text: str, words: list[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, random_weights(is_tied=True), {"tokenizer.ggml.pre": pre})
    definition = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = definition.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words
    assert (
        b"".join(
            map(
                Tokenizer.from_folder(folder).token_bytes,
                Tokenizer.from_folder(folder).encode_plain(text),
            )
        )
        == text.encode()
    )


def test_llama_3_begins_with_its_first_token_unless_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    weights = random_weights(is_tied=True)
    extra: dict[str, object] = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.add_bos_token": None,
    }
    folder = folder_of(tmp_path, weights, extra)
    assert Tokenizer.from_folder(folder).encode_prompt("hell") == (1, 262)
    folder = folder_of(tmp_path, weights, {**extra, "tokenizer.ggml.add_bos_token": False})
    assert Tokenizer.from_folder(folder).encode_prompt("hell") == (262,)
