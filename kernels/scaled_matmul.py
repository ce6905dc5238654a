"""Products of eight-bit matrices, scaled by row and by channel, on tensor cores.

    y[m, n] = (sum over k of x[m, k] w[n, k]) * row scale[m] * channel scale[n] + bias[n]

Shapes: x [rows, depth] and w [channels, depth], both int8 or both e4m3; scales float32 [rows]
and [channels]; bias [channels]; y [rows, channels]. Sums are int32, which is exact, or float32,
into which a tensor core's own sums are carried every 128 products.

A program computes a tile of y as w x^T, not x w^T: channels are then the side of the product
that Hopper's wgmma wants 64 or more of, so one kernel serves one row and ten thousand. With few
rows there are too few tiles to fill a GPU; then several programs share a tile's depth, each
writes its part, and a second kernel adds the parts in order. Tiles come from `matmul_tiles.py`.

Bytes moved, at e bytes a result: channels depth + rows depth + e rows channels, and
8 rows channels splits for parts. From Hopper on, tall products read their tiles with the copy
engine, through descriptors, if rows begin at multiples of 16 bytes.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917 - a kernel's arguments are flat

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.matmul_tiles import Tile, num_splits, tile_for

# The first capability with a copy engine, and what is assumed where there is no GPU.
HOPPER = (9, 0)
_ADD_BLOCK = 1024
# Making a descriptor takes the host longer than a product of so few rows takes a GPU.
_MAX_LOW_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """Eight-bit values [rows, depth] and what each row is to be multiplied with, [rows]."""

    values: Tensor
    scales: Tensor


# Whether there is one row, or a multiple of 16, is not worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def scaled_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    row_scales: tl.tensor,
    channel_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: int,
    channels: int,
    depth: int,
    sum_type: tl.constexpr,
    has_bias: tl.constexpr,
    has_descriptors: tl.constexpr,
    splits: tl.constexpr,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    block_depth: tl.constexpr,
) -> None:
    """One tile of y; with more than one split, one part of it, unscaled."""
    # Programs that run together share tiles: a group of row tiles goes through all channels.
    program, split = tl.program_id(0), tl.program_id(1)
    in_group = group * tl.cdiv(channels, block_channels)
    first = program // in_group * group
    height = min(tl.cdiv(rows, block_rows) - first, group)
    at_row = (first + program % in_group % height) * block_rows
    at_channel = program % in_group // height * block_channels
    row = (at_row + tl.arange(0, block_rows)).to(tl.int64)
    channel = (at_channel + tl.arange(0, block_channels)).to(tl.int64)
    lane = tl.arange(0, block_depth)
    is_row, is_channel = row < rows, channel < channels

    sums = tl.zeros((block_channels, block_rows), sum_type)
    for start in tl.range(split * block_depth, depth, splits * block_depth):
        if has_descriptors:
            w_tile = weight.load([at_channel, start])  # [block_channels, block_depth]
            x_tile = x.load([at_row, start])  # [block_rows, block_depth]
        else:
            is_inside = (start + lane < depth)[None, :]
            w_place = weight + channel[:, None] * depth + start + lane[None, :]
            w_tile = tl.load(w_place, mask=is_channel[:, None] & is_inside, other=0.0)
            x_place = x + row[:, None] * depth + start + lane[None, :]
            x_tile = tl.load(x_place, mask=is_row[:, None] & is_inside, other=0.0)
        if sum_type == tl.int32:
            sums = tl.dot(w_tile, tl.trans(x_tile), sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(w_tile, tl.trans(x_tile), sums, max_num_imprecise_acc=128)

    is_inside = is_row[:, None] & is_channel[None, :]
    place = out + row[:, None] * channels + channel[None, :]  # [block_rows, block_channels]
    if splits > 1:
        part = split.to(tl.int64) * rows * channels
        tl.store(place + part, tl.trans(sums), mask=is_inside)
    else:
        row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
        channel_scale = tl.load(channel_scales + channel, mask=is_channel, other=0.0)
        y = sums.to(tl.float32) * row_scale[None, :] * channel_scale[:, None]
        if has_bias:
            y += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[:, None]
        tl.store(place, tl.trans(y), mask=is_inside)


@triton.jit(do_not_specialize=["rows"])
def add_parts_kernel(
    parts: tl.tensor,
    row_scales: tl.tensor,
    channel_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: int,
    channels: int,
    has_bias: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` channels of one row: the sum of parts [splits, rows, channels], scaled."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    is_channel = channel < channels
    place = parts + row * channels + channel
    sums = tl.load(place, mask=is_channel, other=0)  # [block]
    size = tl.cast(rows, tl.int64) * channels
    for split in tl.static_range(1, splits):
        sums += tl.load(place + split * size, mask=is_channel, other=0)
    channel_scale = tl.load(channel_scales + channel, mask=is_channel, other=0.0)
    y = sums.to(tl.float32) * tl.load(row_scales + row) * channel_scale
    if has_bias:
        y += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, y, mask=is_channel)


def scaled_matmul(
    x: ScaledMatrix, weight: ScaledMatrix, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """y [rows, channels] in `dtype`, of x [rows, depth] and weight [channels, depth]."""
    (rows, depth), channels = x.values.shape, len(weight.values)
    for matrix in (x, weight):
        assert matrix.values.dtype is x.values.dtype, (matrix.values.dtype, x.values.dtype)
        assert matrix.values.shape[1] == depth, (x.values.shape, weight.values.shape)
        assert matrix.scales.shape == matrix.values.shape[:1], matrix.scales.shape
        assert matrix.scales.dtype is torch.float32, matrix.scales.dtype
        assert matrix.values.is_contiguous(), matrix.values.stride()
        assert matrix.scales.is_contiguous(), matrix.scales.stride()
    assert bias is None or bias.shape == (channels,), bias.shape
    assert bias is None or bias.is_contiguous(), bias.stride()
    out = torch.empty((rows, channels), dtype=dtype, device=x.values.device)
    if rows:
        _launch(x, weight, bias, out)
    return out


def has_copy_engine(rows: int, depth: int, capability: tuple[int, int]) -> bool:
    """Whether tiles are read through descriptors: of tall products, where it is possible."""
    return capability >= HOPPER and depth % 16 == 0 and rows > _MAX_LOW_ROWS


def _launch(x: ScaledMatrix, weight: ScaledMatrix, bias: Tensor | None, out: Tensor) -> None:
    rows, channels, depth = *out.shape, x.values.shape[1]
    capability = torch.cuda.get_device_capability(out.device) if out.is_cuda else HOPPER
    tile = tile_for(rows, capability)
    splits = num_splits(tile, rows, channels, depth)
    sum_type, sum_dtype = (
        (tl.int32, torch.int32) if x.values.dtype is torch.int8 else (tl.float32, torch.float32)
    )
    target = out
    if splits > 1:
        target = torch.empty((splits, rows, channels), dtype=sum_dtype, device=out.device)
    scales = (x.scales, weight.scales, out if bias is None else bias)
    has_descriptors = has_copy_engine(rows, depth, capability)
    tiles = triton.cdiv(rows, tile.block_rows) * triton.cdiv(channels, tile.block_channels)
    scaled_matmul_kernel[(tiles, splits)](
        *(_described(x, weight, tile) if has_descriptors else (x.values, weight.values)),
        *scales,
        target,
        rows,
        channels,
        depth,
        sum_type=sum_type,
        has_bias=bias is not None,
        has_descriptors=has_descriptors,
        splits=splits,
        group=tile.group,
        block_rows=tile.block_rows,
        block_channels=tile.block_channels,
        block_depth=tile.block_depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        add_parts_kernel[(rows, triton.cdiv(channels, _ADD_BLOCK))](
            target,
            *scales,
            out,
            rows,
            channels,
            has_bias=bias is not None,
            splits=splits,
            block=_ADD_BLOCK,
            num_warps=4,
        )


def _described(
    x: ScaledMatrix, weight: ScaledMatrix, tile: Tile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(x.values, [tile.block_rows, tile.block_depth]),
        TensorDescriptor.from_tensor(weight.values, [tile.block_channels, tile.block_depth]),
    )
