"""Block copies of a cache with 16 tokens of 128 bfloat16 numbers in a block's run."""

from collections.abc import Iterator

from kernels.configuration import Configuration
from kernels.copy_blocks import copy_blocks_kernel


def configurations(capability: int) -> Iterator[Configuration]:  # noqa: ARG001 - same everywhere
    """What is launched on this capability."""
    types = {"source": "*i32", "target": "*i32", "sources": "*i64", "destinations": "*i64"}
    types |= dict.fromkeys(("num_runs", "source_blocks", "target_blocks"), "i32")
    yield Configuration(
        "copy_blocks 16 x 128",
        copy_blocks_kernel,
        {**types, "heads": "i32:16"},
        {"words": 1024, "block": 1024},
    )
