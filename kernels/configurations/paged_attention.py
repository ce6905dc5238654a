"""Attention of Llama 3 8B, SmolLM2 and Gemma 2, as decodes and chunks; e4m3 caches from 90 on."""

from collections.abc import Iterator

import torch

from kernels.attention_rows import AttentionShape
from kernels.configuration import Configuration
from kernels.paged_attention import merge_parts_kernel, paged_attention_kernel
from kernels.tuned_shapes import Work, attention_tile

_LLAMA = AttentionShape(32, 8, 128, 16, torch.bfloat16)
_SMOL = AttentionShape(9, 3, 64, 16, torch.bfloat16)
_GEMMA = AttentionShape(16, 8, 256, 16, torch.bfloat16)
_HOPPER = 90


def configurations(capability: int) -> Iterator[Configuration]:
    """What is launched on this capability."""
    yield _attention("llama chunk", Work.CHUNK, _LLAMA, capability)
    yield _attention("llama decode", Work.DECODE, _LLAMA, capability)
    yield _attention("llama decode, split", Work.DECODE, _LLAMA, capability, splits=8)
    yield _attention("smol chunk", Work.CHUNK, _SMOL, capability)
    yield _attention("gemma chunk, window, cap", Work.CHUNK, _GEMMA, capability)
    yield _attention("gemma decode, window, cap", Work.DECODE, _GEMMA, capability)
    if capability >= _HOPPER:
        yield _attention("llama chunk, e4m3", Work.CHUNK, _LLAMA, capability, cached="fp8e4nv")
        yield _attention("llama decode, e4m3", Work.DECODE, _LLAMA, capability, cached="fp8e4nv")
    types = {"parts": "*fp32", "weights": "*fp32", "out": "*bf16", "tiles": "*i32"}
    yield Configuration(
        "merge_parts 8 x 128",
        merge_parts_kernel,
        {**types, "offsets": "*i32"},
        {"splits": 8, "head_dim": 128, "block_dim": 128},
    )


def _attention(
    name: str,
    work: Work,
    shape: AttentionShape,
    capability: int,
    *,
    splits: int = 1,
    cached: str = "bf16",
) -> Configuration:
    is_capped = shape is _GEMMA
    tile = attention_tile(work, shape.block_dim, 2, divmod(capability, 10))
    rows = shape.rows_of(work, tile)
    types = {
        "query": "*bf16",
        "cache": f"*{cached}",
        "out": "*bf16" if splits == 1 else "*fp32",
        "weights": "*bf16" if splits == 1 else "*fp32",
    }
    types |= dict.fromkeys(("tiles", "starts", "offsets", "block_tables"), "*i32")
    types |= {"query_stride": "i32:16", "table_stride": "i32", "num_slots": "i32:16"}
    types |= dict.fromkeys(("scale", "soft_cap", "value_scale"), "fp32")
    types |= {"window": "i32"}
    constants = {
        "has_window": is_capped,
        "has_soft_cap": is_capped,
        "splits": splits,
        "group": shape.group,
        "head_dim": shape.head_dim,
        "block_dim": shape.block_dim,
        "block_size": shape.block_size,
        "block_rows": rows,
        "block_keys": tile.block_keys,
        "tile_tokens": 1 if work is Work.DECODE else rows // shape.group,
    }
    return Configuration(
        f"paged_attention {name}",
        paged_attention_kernel,
        types,
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_dot=True,
        has_low_tiles=work is Work.DECODE,
    )
