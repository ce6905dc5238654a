"""The tensors of a model folder: one model.safetensors, or shards and the index that names them.

A folder that is not exactly what its index says is refused with the name of the file: a missing
shard must never become random weights, and a shard that nobody mentions belongs to another
model. Safetensors holds numbers and nothing else; files that could run code are refused too.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class WeightsNotUsable(ValueError):
    """The folder's weights are incomplete, ambiguous or unreadable; the text names the file."""


class _OpenTensor(Protocol):
    """A tensor whose numbers are read when it is indexed, and no others."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    """What is used of safetensors' reader."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> "_OpenTensor": ...


class SafetensorsFolder:
    """Tensors by name, each read from disk when it is taken, and taken once."""

    def __init__(self, folder: Path) -> None:
        """Open and compare all files; raises WeightsNotUsable."""
        _refuse_pickles(folder)
        shards = _shards(folder)
        _refuse_strays(folder, shards)
        self._folder = folder
        self._files: dict[str, _OpenFile] = {name: _opened(folder / name) for name in shards}
        self._places: dict[str, str] = {}
        for name, expected in shards.items():
            self._enter(name, set(self._files[name].keys()), expected)

    def take(self, name: str, *shape: int, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, which must have this shape and be bfloat16, float16 or float32.

        `part` is what to read of it, by dimension; by default all.
        """
        place = self._places.pop(name, None)
        if place is None:
            raise WeightsNotUsable(f"{self._folder}: the checkpoint has no tensor {name}.")
        stored = self._files[place].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise WeightsNotUsable(
                f"Tensor {name} in {place} is {stored.get_shape()}; config.json says {list(shape)}."
            )
        tensor = stored[part or tuple(slice(size) for size in shape)]
        if tensor.dtype not in _FLOATS:
            raise WeightsNotUsable(
                f"Tensor {name} in {place} is {tensor.dtype}; supported: bfloat16, float16, "
                "float32."
            )
        return tensor

    def discard(self, name: str) -> None:
        """Do without a tensor that may or may not be there."""
        self._places.pop(name, None)

    def refuse_leftovers(self) -> None:
        """Raise WeightsNotUsable if a tensor was not taken: config.json does not know it."""
        # Old checkpoints store this table; it follows from theta.
        unknown = [name for name in self._places if not name.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise WeightsNotUsable(
                f"The checkpoint holds {len(unknown)} tensors that config.json does not account "
                f"for, such as {min(unknown)} in {self._places[min(unknown)]}."
            )

    def _enter(self, file: str, found: set[str], expected: set[str] | None) -> None:
        missing = set() if expected is None else expected - found
        if missing:
            raise WeightsNotUsable(
                f"{self._folder / file} has no tensor {min(missing)}, which {_INDEX} places there."
            )
        extra = set() if expected is None else found - expected
        if extra:
            raise WeightsNotUsable(
                f"{self._folder / file} holds tensor {min(extra)}, which {_INDEX} does not "
                "place there."
            )
        self._places |= dict.fromkeys(found, file)


def _refuse_pickles(folder: Path) -> None:
    if not folder.is_dir():
        raise WeightsNotUsable(f"{folder} is not a folder.")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise WeightsNotUsable(
            f"{folder} holds {pickles[0]}: loading such a file can run code. Only safetensors "
            "are accepted; remove it or convert it."
        )


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """Each file that makes up the model and the tensors it must hold; None: whatever it holds."""
    if not (folder / _INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            raise WeightsNotUsable(f"{folder} holds no {_SINGLE} and no {_INDEX}.")
        return {_SINGLE: None}
    shards: dict[str, set[str] | None] = {}
    by_file: dict[str, set[str]] = {}
    for tensor, file in _weight_map(folder / _INDEX).items():
        by_file.setdefault(file, set()).add(tensor)
    for file, tensors in sorted(by_file.items()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsNotUsable(
                f"{folder / _INDEX} names {file!r}, which is not a safetensors file beside it."
            )
        if not (folder / file).is_file():
            raise WeightsNotUsable(
                f"{folder / file} is missing: {_INDEX} places {len(tensors)} tensors there."
            )
        shards[file] = tensors
    return shards


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsNotUsable(f"{path} is not JSON: {error}.") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise WeightsNotUsable(f"{path} has no weight_map.")
    if not all(isinstance(file, str) for file in places.values()):
        raise WeightsNotUsable(f"{path}: weight_map does not map names to files.")
    return places


def _refuse_strays(folder: Path, shards: Iterable[str]) -> None:
    strays = {path.name for path in folder.glob("*.safetensors")} - set(shards)
    if strays:
        source = _INDEX if (folder / _INDEX).is_file() else _SINGLE
        raise WeightsNotUsable(
            f"{folder / min(strays)} is not part of the model, which is {source}. Remove it, or "
            f"give the folder the {_INDEX} that names it."
        )


def _opened(path: Path) -> _OpenFile:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsNotUsable(f"{path} is not a readable safetensors file: {error}.") from error
