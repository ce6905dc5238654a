"""What cannot be run faithfully is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config_file import UnsupportedModel
from engine.models.description import read_description
from engine.models.loader import load_decoder
from engine.models.rope_description import PlainRope
from tests.engine.oracle import write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    return tmp_path


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changed
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "b.pkl", "c.pickle", "d.pth"])
def test_a_folder_with_a_pickle_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=name):
        load_decoder(folder, "float32")


def test_python_files_in_the_folder_are_never_run(folder: Path) -> None:
    (folder / "modeling_llama.py").write_text("raise SystemExit('imported')")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.Model"})
    load_decoder(folder, "float32")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": None}, "None is not supported"),
        ({"model_type": "mixtral"}, "'mixtral' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported; supported: default"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"full_attention": {"type": "linear"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"vision_config": {"depth": 2}}, "vision_config is not supported; supported: text"),
        ({"num_local_experts": 8}, "num_local_experts is not supported; supported: dense"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', not true or false"),
        ({"model_type": "qwen2"}, "no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "no tensor model.layers.0.self_attn.q_norm.weight"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear"] * 3},
            "layer type 'linear' is not supported; supported: full_attention",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 9.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 9.0}, "final_logit_softcapping is not supported for"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is not a list of 3"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"vocab_size": 261}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 4}, "no tensor model.layers.3"),
        ({"num_hidden_layers": 2}, "not account"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"eos_token_id": None}, None),
    ],
)
def test_configs_beyond_us_are_refused_by_name(
    folder: Path, fields: dict[str, object], named: str | None
) -> None:
    change_config(folder, **fields)
    if named is None:
        load_decoder(folder, "float32")
    else:
        with pytest.raises(UnsupportedModel, match=named):
            load_decoder(folder, "float32")


def test_missing_strange_and_integer_tensors_are_refused_by_name(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.strange": torch.zeros(1)})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.strange"):
        load_decoder(folder, "float32")
    change_tensors(folder, {"model.layers.0.strange": None, "model.norm.weight": None})
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.norm\.weight"):
        load_decoder(folder, "float32")
    change_tensors(folder, {"model.norm.weight": torch.zeros(48, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match="int8"):
        load_decoder(folder, "float32")


def test_broken_files_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is not a readable"):
        load_decoder(folder, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"holds no model\.safetensors"):
        load_decoder(folder, "float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        load_decoder(folder, "float32")


def test_an_unknown_dtype_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="float8"):
        load_decoder(folder, "float8")


def test_rope_theta_is_found_in_old_and_new_configs(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_description(folder).ropes == (PlainRope(5e5),)
    change_config(folder, rope_parameters=None, rope_scaling=None, rope_theta=1e6)
    assert read_description(folder).ropes == (PlainRope(1e6),)


def test_dynamic_rope_is_plain_rope_up_to_the_longest_sequence_served(folder: Path) -> None:
    change_config(
        folder,
        rope_parameters=None,
        rope_scaling={"type": "dynamic", "factor": 4.0},
        rope_theta=5e5,
    )
    description = read_description(folder)
    assert description.ropes == (PlainRope(5e5),)
    assert description.max_position_embeddings == 512


def test_the_generation_config_knows_the_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_description(folder).eos_token_ids == {7, 9}
    (folder / "generation_config.json").unlink()
    assert read_description(folder).eos_token_ids == {2}
