"""Drawing tokens from float32 and from bfloat16 scores."""

from collections.abc import Iterator

from kernels.configuration import Configuration
from kernels.sample import sample_kernel


def configurations(capability: int) -> Iterator[Configuration]:  # noqa: ARG001 - all alike
    """What is launched, on whatever GPU."""
    for scores in ("fp32", "bf16"):
        yield Configuration(
            f"sample {scores}",
            sample_kernel,
            {
                "scores": f"*{scores}",
                "tokens": "*i64",
                **dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp32"),
                **dict.fromkeys(("top_ks", "seeds", "choices", "positions"), "*i64"),
                **dict.fromkeys(("stride", "vocab_size"), "i32:16"),
            },
            {"block": 4096},
            num_warps=16,
        )
