"""Eight-bit projections: every tile of the table at a layer of Llama 3 8B, and their quantisers."""

from collections.abc import Iterator, Mapping

import triton.language as tl

from kernels.configuration import Configuration
from kernels.fp8_linear import quantise_fp8_kernel
from kernels.int8_linear import quantise_int8_kernel
from kernels.matmul_tiles import num_splits, tile_for
from kernels.scaled_matmul import add_parts_kernel, has_copy_engine, scaled_matmul_kernel

_CHANNELS, _DEPTH = 4096, 4096
_ROWS = (16, 32, 64, 256, 1024, 8192)
_HOPPER = 90
# What a number is, what its sums are, and what quantises to it.
_UNITS = {
    "i8": ("i32", tl.int32, quantise_int8_kernel),
    "fp8e4nv": ("fp32", tl.float32, quantise_fp8_kernel),
}
_SCALES: Mapping[str, str] = {
    "row_scales": "*fp32",
    "channel_scales": "*fp32",
    "bias": "*bf16",
    "rows": "i32",
    "channels": "i32:16",
}


def configurations(capability: int) -> Iterator[Configuration]:
    """What is launched on this capability: e4m3 from 90 on."""
    for unit, (sums, _, quantiser) in _UNITS.items():
        if unit != "i8" and capability < _HOPPER:
            continue
        yield Configuration(
            f"quantise {unit}",
            quantiser,
            {
                "x": "*bf16",
                "values": f"*{unit}",
                "scales": "*fp32",
                **dict.fromkeys(("stride", "width"), "i32:16"),
            },
            {"block": 4096},
            num_warps=8,
        )
        yield from (_product(unit, rows, capability) for rows in _ROWS)
        yield Configuration(
            f"add_parts {unit}",
            add_parts_kernel,
            {**_SCALES, "parts": f"*{sums}", "out": "*bf16"},
            {"has_bias": True, "splits": 4, "block": 1024},
        )


def _product(unit: str, rows: int, capability: int) -> Configuration:
    sums, sum_type, _ = _UNITS[unit]
    major_minor = divmod(capability, 10)
    tile = tile_for(rows, major_minor)
    splits = num_splits(tile, rows, _CHANNELS, _DEPTH)
    described = has_copy_engine(rows, _DEPTH, major_minor)
    x = f"tensordesc<{unit}[{tile.block_rows}, {tile.block_depth}]>"
    weight = f"tensordesc<{unit}[{tile.block_channels}, {tile.block_depth}]>"
    return Configuration(
        f"scaled_matmul {unit}, {rows} rows",
        scaled_matmul_kernel,
        {
            **_SCALES,
            "x": x if described else f"*{unit}",
            "weight": weight if described else f"*{unit}",
            "out": "*bf16" if splits == 1 else f"*{sums}",
            "depth": "i32:16",
        },
        {
            "sum_type": sum_type,
            "has_bias": splits == 1,
            "has_descriptors": described,
            "splits": splits,
            "group": tile.group,
            "block_rows": tile.block_rows,
            "block_channels": tile.block_channels,
            "block_depth": tile.block_depth,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_dot=True,
    )
