"""Turns a GGUF file into a model folder of safetensors and tokenizer files.

Quantised tensors are computed back to float32 and rounded once, to bfloat16. Only what is
known to be right is converted: another architecture, an unknown tensor or a setting without
a counterpart is refused by name, for a model that loads wrongly still speaks fluently.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import safetensors

from engine.weights.gguf_architectures import ModelShape, hf_rows, read_shape, tensor_names
from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported
from engine.weights.gguf_rope import DIVISORS, rope_scaling
from engine.weights.gguf_tokenizer import tokenizer_files


def convert_gguf(source: Path, folder: Path) -> None:
    """Write model.safetensors, the configs, the tokenizer and the chat template into `folder`.

    The folder exists and is empty. The whole model is in memory once, in bfloat16.
    Raises GgufNotSupported when the file is not a model that can be converted exactly.
    """
    try:
        reader = gguf.GGUFReader(source)
    # The reader asserts, indexes and decodes its way through a malformed file.
    except (OSError, ValueError, AssertionError, IndexError, KeyError) as error:
        raise GgufNotSupported(f"{source.name} is not a readable GGUF file: {error}") from error
    metadata = GgufMetadata(
        {name: entry.contents() for name, entry in reader.fields.items()}, source.name
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape = read_shape(metadata, has_output="output.weight" in tensors)
    divisors = tensors.pop(DIVISORS, None)
    scaling = rope_scaling(metadata, shape, None if divisors is None else _dequantised(divisors))
    _write_tensors(_converted(tensors.values(), shape), folder / "model.safetensors")
    documents: dict[str, Mapping[str, object]] = {
        "config.json": shape.config(scaling),
        "generation_config.json": shape.generation_config(),
        **tokenizer_files(metadata),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    template = metadata.optional_text("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _converted(
    found: Iterable[gguf.ReaderTensor], shape: ModelShape
) -> dict[str, npt.NDArray[np.uint16]]:
    """Hugging Face name to bfloat16 bits, for exactly the tensors that the shape calls for."""
    expected = tensor_names(shape)
    tensors = {}
    for tensor in found:
        target = expected.pop(tensor.name, None)
        if target is None:
            raise GgufNotSupported(f"Tensor {tensor.name!r} has no place in a {shape.name} model.")
        rows = _dequantised(tensor).reshape([int(size) for size in reversed(tensor.shape)])
        if rows.shape != target.shape:
            raise GgufNotSupported(
                f"Tensor {tensor.name!r} has shape {rows.shape}; {target.shape} was expected."
            )
        tensors[target.name] = _bfloat16_bits(hf_rows(rows, target), tensor.name)
    if expected:
        raise GgufNotSupported(f"Tensors are missing: {', '.join(sorted(expected))}.")
    return tensors


def _dequantised(tensor: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
    try:
        values: npt.NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise GgufNotSupported(f"Tensor {tensor.name!r} has type {kind}.") from error
    return values


def _bfloat16_bits(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even: bfloat16 is the upper half of a float32."""
    if not np.isfinite(values).all():
        raise GgufNotSupported(f"Tensor {name!r} holds values that are not finite.")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = 0x7FFF + ((bits >> 16) & 1)
    return ((bits + rounding) >> 16).astype(np.uint16)


def _write_tensors(tensors: Mapping[str, npt.NDArray[np.uint16]], path: Path) -> None:
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes
        )
        for name, bits in tensors.items()
    }
    safetensors.serialize_file(specs, os.fspath(path), {"format": "pt"})
    # The library makes the file private to its owner, unlike the files beside it.
    path.chmod(0o644)
