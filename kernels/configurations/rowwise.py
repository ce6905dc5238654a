"""Norms, gated activations and logprobs of Llama 3 8B and SmolLM2: none has a product."""

from collections.abc import Iterator

from kernels.configuration import Configuration
from kernels.gelu_mul import gelu_mul_kernel
from kernels.logprobs import chosen_logprobs_kernel
from kernels.rms_norm import num_norm_warps, rms_norm_kernel
from kernels.silu_mul import silu_mul_kernel


def configurations(capability: int) -> Iterator[Configuration]:  # noqa: ARG001 - all alike
    """What is launched, on whatever GPU."""
    for hidden, block in ((4096, 4096), (576, 1024), (16384, 16384)):
        for adds in (False, True):
            yield Configuration(
                f"{'add_' if adds else ''}rms_norm {hidden}",
                rms_norm_kernel,
                {
                    **dict.fromkeys(("x", "residual", "weight", "out"), "*bf16"),
                    **dict.fromkeys(("x_stride", "hidden"), "i32:16"),
                    "eps": "fp32",
                },
                {"adds": adds, "block": block},
                num_warps=num_norm_warps(block),
            )
    for name, kernel in (("silu_mul", silu_mul_kernel), ("gelu_mul", gelu_mul_kernel)):
        yield Configuration(
            name,
            kernel,
            {"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16", "width": "i32:16"},
            {"block": 1024},
        )
    sizes = {"stride": "i32:16", "vocab_size": "i32:16"}
    yield Configuration(
        "chosen_logprobs",
        chosen_logprobs_kernel,
        {"logits": "*bf16", "token_ids": "*i64", "out": "*fp32", **sizes},
        {"block": 4096},
        num_warps=16,
    )
