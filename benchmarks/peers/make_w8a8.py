"""Quantises a model folder to int8 weights and activations, in the layout that vLLM reads.

    python -m benchmarks.peers.make_w8a8 FOLDER NEW_FOLDER

Weights get one scale for each output channel, activations one for each token while it runs:
what vLLM calls W8A8. Embeddings and norms stay as they are. Needs torch and safetensors.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LARGEST = 127.0
# The "compressed-tensors" description of exactly that scheme.
_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
    "group_size": None,
}
_ACTIVATIONS = {**_WEIGHTS, "strategy": "token", "dynamic": True}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _WEIGHTS,
            "input_activations": _ACTIVATIONS,
            "output_activations": None,
        }
    },
}


def make_w8a8(folder: Path, new_folder: Path) -> None:
    """Write the quantised copy of a folder whose weights are one safetensors file."""
    new_folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, new_folder / path.name)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= _quantised(name, tensor)
    save_file(tensors, new_folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _QUANTIZATION
    (new_folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _quantised(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A projection [out, in] as int8 with its scales [out, 1]; anything else as it is."""
    if not name.endswith("_proj.weight"):
        return {name: tensor}
    weight = tensor.float()
    scale = (weight.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp_min(1e-8)
    rounded = (weight / scale).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return {name: rounded, f"{name}_scale": scale.to(torch.bfloat16)}


if __name__ == "__main__":
    make_w8a8(Path(sys.argv[1]), Path(sys.argv[2]))
