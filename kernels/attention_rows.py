"""The rows of one step as attention's kernels want them: built once, used by all layers.

A row is a run of one sequence's tokens. Rows of one token (decodes) are one tile each; longer
ones (chunks) are cut into tiles of as many tokens as a program attends at once. A tile is its
row and its first token in it; those with the longest contexts come first, so that a GPU does not
end with one of them alone. Made from numpy arrays, carried to the device in one copy.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.tuned_shapes import MIN_ROWS, AttentionTile, Work, attention_tile

Ints = NDArray[np.int64]
# What is assumed where there is no GPU.
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer's heads, the dtype of its queries, and the tokens of a block of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_dim(self) -> int:
        """The power of two that a head is padded to."""
        return max(MIN_ROWS, int(triton.next_power_of_2(self.head_dim)))

    def tile(self, work: Work, device: torch.device) -> AttentionTile:
        """The tile of this work on this device."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _HOPPER
        return attention_tile(work, self.block_dim, self.dtype.itemsize, capability)

    def rows_of(self, work: Work, tile: AttentionTile) -> int:
        """How high the tile is, so that at least one token's group fits."""
        group = int(triton.next_power_of_2(self.group))
        return max(MIN_ROWS, group) if work is Work.DECODE else max(tile.block_rows, group)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Where a step's rows begin and which blocks hold their contexts, on the device.

    starts [rows] are first positions, offsets [rows + 1] first tokens of the step, both int32, as
    are block_tables [rows, width]. `decodes` and `chunks` [tiles, 2] are (row, first token).
    `longest` is the longest context of a decode, with the token itself.
    """

    shape: AttentionShape
    starts: Tensor
    offsets: Tensor
    block_tables: Tensor
    decodes: Tensor
    chunks: Tensor
    longest: int


def attention_rows(
    starts: Ints,
    counts: Ints,
    block_tables: NDArray[np.int32],
    shape: AttentionShape,
    device: torch.device,
) -> AttentionRows:
    """Lay out rows of counts [rows] tokens from positions starts [rows] on, in their blocks.

    block_tables [rows, width] names each row's blocks in order; what stands behind the context
    means nothing and is not read.
    """
    assert shape.num_heads % shape.num_kv_heads == 0, shape
    assert len(starts) == len(counts) == len(block_tables), (starts, counts, block_tables.shape)
    contexts = starts + counts
    decode_rows = np.flatnonzero(counts == 1)
    decodes = np.stack((decode_rows, np.zeros_like(decode_rows)), axis=1)
    rows = shape.rows_of(Work.CHUNK, shape.tile(Work.CHUNK, device))
    parts = (
        np.concatenate(([0], np.cumsum(counts))),
        starts,
        decodes[np.argsort(-contexts[decode_rows], kind="stable")],
        _chunk_tiles(starts, counts, rows // shape.group),
        block_tables,
    )
    flat = np.concatenate([part.ravel() for part in parts]).astype(np.int32)
    packed = torch.from_numpy(flat)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    ends = np.cumsum([part.size for part in parts])[:-1].tolist()
    offsets, firsts, decode_tiles, chunk_tiles, tables = packed.tensor_split(ends)
    return AttentionRows(
        shape,
        firsts,
        offsets,
        tables.view(block_tables.shape),
        decode_tiles.view(-1, 2),
        chunk_tiles.view(-1, 2),
        int(contexts[decode_rows].max(initial=0)),
    )


def _chunk_tiles(starts: Ints, counts: Ints, tokens: int) -> Ints:
    """Rows of more than one token, cut into (row, first token), longest contexts first."""
    num_tiles = np.where(counts > 1, -(-counts // tokens), 0)
    rows = np.repeat(np.arange(len(counts)), num_tiles)
    firsts = (np.arange(len(rows)) - (np.cumsum(num_tiles) - num_tiles)[rows]) * tokens
    longest_first = np.argsort(-(starts[rows] + firsts), kind="stable")
    return np.stack((rows, firsts), axis=1)[longest_first]
