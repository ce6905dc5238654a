"""A config is read as transformers reads it, also where it leaves things out."""

import json
from pathlib import Path

import pytest

from engine.models.config_file import UnsupportedModel
from engine.models.description import DecoderDescription, read_description
from engine.models.rope_description import Llama3Rope, PlainRope, YarnRope

SIZES: dict[str, object] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def described(folder: Path, **fields: object) -> DecoderDescription:
    (folder / "config.json").write_text(json.dumps({**SIZES, **fields}))
    return read_description(folder)


def windows(description: DecoderDescription) -> list[int | None]:
    return [layer.attention.window for layer in description.layers]


def test_mistral_has_a_window_unless_its_config_says_null(tmp_path: Path) -> None:
    assert windows(described(tmp_path, model_type="mistral")) == [4096] * 6
    assert windows(described(tmp_path, model_type="mistral", sliding_window=8)) == [8] * 6
    assert windows(described(tmp_path, model_type="mistral", sliding_window=None)) == [None] * 6


def test_qwens_window_counts_only_when_it_is_switched_on(tmp_path: Path) -> None:
    qwen: dict[str, object] = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 4}
    assert windows(described(tmp_path, **qwen)) == [None] * 6
    qwen["use_sliding_window"] = True
    assert windows(described(tmp_path, **qwen)) == [None] * 4 + [8, 8]
    assert windows(described(tmp_path, **{**qwen, "max_window_layers": 0})) == [8] * 6
    assert windows(described(tmp_path, **{**qwen, "max_window_layers": None})) == [None] * 6


def test_a_llama_has_no_window_whatever_its_config_says(tmp_path: Path) -> None:
    llama = described(tmp_path, model_type="llama", sliding_window=8, use_sliding_window=True)
    assert windows(llama) == [None] * 6


def test_gemmas_windows_alternate_in_the_pattern_of_each_version(tmp_path: Path) -> None:
    gemma_2 = described(tmp_path, model_type="gemma2", sliding_window=8)
    assert windows(gemma_2) == [8, None] * 3
    gemma_3 = described(tmp_path, model_type="gemma3_text", sliding_window=8)
    assert windows(gemma_3) == [8] * 5 + [None]
    assert gemma_3.ropes == (PlainRope(1e6), PlainRope(1e4))
    assert [layer.rope for layer in gemma_3.layers] == [1] * 5 + [0]
    patterned = described(
        tmp_path, model_type="gemma3_text", sliding_window=8, sliding_window_pattern=3
    )
    assert windows(patterned) == [8, 8, None] * 2


def test_every_fourth_layer_of_smollm_3_has_no_rope(tmp_path: Path) -> None:
    smollm = described(tmp_path, model_type="smollm3")
    assert [layer.rope for layer in smollm.layers] == [0, 0, 0, None, 0, 0]
    assert smollm.ropes == (PlainRope(2e6),)
    assert smollm.has_tied_embeddings


def test_a_null_soft_cap_takes_gemmas_own_away(tmp_path: Path) -> None:
    gemma = described(tmp_path, model_type="gemma2")
    assert (gemma.logit_soft_cap, gemma.layers[0].attention.soft_cap) == (30.0, 50.0)
    gemma = described(
        tmp_path,
        model_type="gemma2",
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
    )
    assert (gemma.logit_soft_cap, gemma.layers[0].attention.soft_cap) == (None, None)


def test_biases_follow_the_family_and_then_the_config(tmp_path: Path) -> None:
    def biases(**fields: object) -> tuple[bool, bool, bool]:
        one = described(tmp_path, **fields)
        return one.has_qkv_bias, one.has_attention_out_bias, one.has_mlp_bias

    stated: dict[str, object] = {"attention_bias": True, "mlp_bias": True}
    assert biases(model_type="llama") == (False, False, False)
    assert biases(model_type="llama", **stated) == (True, True, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", **stated) == (True, True, False)
    assert biases(model_type="mistral", **stated) == (False, False, False)


def test_the_length_that_rope_was_trained_on_may_be_left_out(tmp_path: Path) -> None:
    llama_3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    one = described(tmp_path, model_type="llama", rope_scaling=llama_3, rope_theta=5e5)
    assert one.ropes == (Llama3Rope(5e5, 8, 1, 4, original_positions=128),)
    yarn = {"type": "yarn", "original_max_position_embeddings": 32}
    (rope,) = described(tmp_path, model_type="qwen2", rope_scaling=yarn).ropes
    assert isinstance(rope, YarnRope)
    assert (rope.factor, rope.beta_fast, rope.beta_slow) == (4.0, 32.0, 1.0)


def test_bounds_of_llama_3s_rope_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    wrong = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}
    with pytest.raises(UnsupportedModel, match=r"low_freq_factor 4\.0 is not below"):
        described(tmp_path, model_type="llama", rope_scaling=wrong)
