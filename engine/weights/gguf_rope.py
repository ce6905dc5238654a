"""How a GGUF file says that positions are scaled, told in the words of config.json.

Linear and YaRN scaling are settings. Llama 3's is a tensor of divisors, one per frequency,
from which its settings are guessed and then proved: a guess that does not give the very same
divisors is refused.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine.weights.gguf_architectures import ModelShape
from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported

DIVISORS = "rope_freqs.weight"

# Every Llama 3.1, 3.2 and 3.3 has these; only the factor differs.
_LOW, _HIGH, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192

_UNSUPPORTED = (
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


def rope_scaling(
    metadata: GgufMetadata, shape: ModelShape, divisors: npt.NDArray[np.float32] | None
) -> Mapping[str, object] | None:
    """The value of rope_scaling, None for none; `divisors` [head_dim / 2] if the file has them.

    Raises GgufNotSupported.
    """
    for key in _UNSUPPORTED:
        metadata.refuse(f"{shape.name}.{key}")
    prefix = f"{shape.name}.rope.scaling"
    kind = metadata.optional_text(f"{prefix}.type") or "none"
    if divisors is not None:
        metadata.require(f"{prefix}.type", "none")
        return _llama3(shape, divisors)
    match kind:
        case "none":
            metadata.refuse(f"{prefix}.factor")
            return None
        case "linear":
            return {"rope_type": "linear", "factor": metadata.number(f"{prefix}.factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": metadata.number(f"{prefix}.factor"),
                "original_max_position_embeddings": metadata.integer(
                    f"{prefix}.original_context_length"
                ),
            }
        case _:
            raise GgufNotSupported(
                f"Rope scaling {kind!r} is not converted; supported: none, linear, yarn."
            )


def _llama3(shape: ModelShape, divisors: npt.NDArray[np.float32]) -> Mapping[str, object]:
    factor = float(divisors.max(initial=1.0))
    exponents = np.arange(0, shape.head_dim, 2) / shape.head_dim
    turns = _ORIGINAL_POSITIONS * shape.rope_theta**-exponents / (2 * math.pi)
    fastness = ((turns - _LOW) / (_HIGH - _LOW)).clip(0, 1)
    expected = 1 / ((1 - fastness) / factor + fastness)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise GgufNotSupported(
            f"Tensor {DIVISORS!r} does not hold Llama 3's rope scaling; no other is converted."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }
