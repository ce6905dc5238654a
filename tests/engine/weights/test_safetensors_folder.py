"""A folder whose shards are not exactly those of its index is refused, with the file named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights.safetensors_folder import SafetensorsFolder, WeightsNotUsable

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: {"a": torch.ones(2, 3), "b": torch.zeros(4)}, SECOND: {"c": torch.ones(5)}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        save_file(tensors, tmp_path / name)
    write_index(tmp_path, {tensor: name for name, part in SHARDS.items() for tensor in part})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsNotUsable) as caught:
        SafetensorsFolder(folder)
    return str(caught.value)


def test_tensors_come_from_the_shard_that_has_them_once_each(folder: Path) -> None:
    tensors = SafetensorsFolder(folder)
    assert torch.equal(tensors.take("a", 2, 3), torch.ones(2, 3))
    assert torch.equal(tensors.take("c", 5), torch.ones(5))
    with pytest.raises(WeightsNotUsable, match=f"such as b in {FIRST}"):
        tensors.refuse_leftovers()
    tensors.discard("b")
    tensors.refuse_leftovers()
    with pytest.raises(WeightsNotUsable, match="no tensor a"):
        tensors.take("a", 2, 3)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert f"{SECOND} is missing" in refusal(folder)


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_a_stray_shard_is_named(folder: Path, name: str) -> None:
    save_file({"d": torch.ones(1)}, folder / name)
    assert f"{name} is not part of the model" in refusal(folder)


def test_shards_without_their_index_are_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"no model.safetensors and no {INDEX}" in refusal(folder)
    (folder / FIRST).rename(folder / "model.safetensors")
    assert f"{SECOND} is not part of the model" in refusal(folder)


def test_a_tensor_that_is_not_where_the_index_says_is_named(folder: Path) -> None:
    write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"{FIRST} holds tensor b" in refusal(folder)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND})
    assert f"{SECOND} has no tensor d" in refusal(folder)


def test_a_shard_cut_short_is_named(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-3])
    assert f"{SECOND} is not a readable safetensors file" in refusal(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.json", ""])
def test_an_index_cannot_name_files_elsewhere_or_of_another_kind(folder: Path, file: str) -> None:
    write_index(folder, {"a": file})
    assert "not a safetensors file beside it" in refusal(folder)


@pytest.mark.parametrize("weight_map", [{}, [], None, {"a": 1}])
def test_an_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "weight_map" in refusal(folder)
    (folder / INDEX).write_text("{")
    assert "not JSON" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_a_tensor_of_another_type_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsNotUsable, match=r"Tensor a in model\.safetensors is torch\."):
        SafetensorsFolder(tmp_path).take("a", 2)
