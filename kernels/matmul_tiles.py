"""Which tile of an eight-bit product a program computes, by its number of rows: data, not search.

Nothing is tuned while requests wait. The tables follow from three rules: with up to some 300
rows a product is bound by reading weights, so tiles are as low as the rows and many reads are
under way; beyond that it is bound by tensor cores, so tiles are as large as registers let them
be; `num_stages` tiles must fit into shared memory: 227 KiB on compute capability 9.0 and 10.0,
99 KiB on the least of the others. Not yet measured on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Programs that fill a large GPU twice over: 132 multiprocessors on an H100.
_PROGRAMS = 264
_MAX_SPLITS = 16
# A part of a tile's depth that is shorter than so many steps does not fill its pipeline.
_MIN_STEPS = 4
# Parts are written and read again, 8 bytes each: no more than a quarter of the weights' bytes.
_PART_BYTES = 4 * 8
_LARGE_SHARED_MEMORY = ((9, 0), (10, 0))


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, channels and depth of one step of one program, and how it is run.

    `group` row tiles are computed beside each other before the next tile of channels.
    """

    block_rows: int
    block_channels: int
    block_depth: int
    num_warps: int
    num_stages: int
    group: int = 8


# (up to so many rows, tile), in rising order; the last one has no limit.
Tiles = Sequence[tuple[int | None, Tile]]

_FEW_ROWS: Tiles = (
    (16, Tile(16, 64, 256, num_warps=4, num_stages=4)),
    (32, Tile(32, 64, 128, num_warps=4, num_stages=6)),
    (64, Tile(64, 64, 128, num_warps=4, num_stages=4)),
)
LARGE: Tiles = (
    *_FEW_ROWS,
    (256, Tile(128, 64, 128, num_warps=4, num_stages=4)),
    (1024, Tile(128, 128, 128, num_warps=8, num_stages=4)),
    (None, Tile(128, 256, 128, num_warps=8, num_stages=3)),
)
SMALL: Tiles = (
    *_FEW_ROWS,
    (None, Tile(128, 128, 128, num_warps=8, num_stages=3)),
)


def tile_for(rows: int, capability: tuple[int, int]) -> Tile:
    """The tile of a product of so many rows."""
    tiles = LARGE if capability in _LARGE_SHARED_MEMORY else SMALL
    return next(tile for limit, tile in tiles if limit is None or rows <= limit)


def num_splits(tile: Tile, rows: int, channels: int, depth: int) -> int:
    """Over how many programs the depth of each tile is spread, to have enough of them.

    The same for all numbers of rows that fill as many tiles: each answer is compiled once.
    """
    row_tiles = -(-rows // tile.block_rows)
    wanted = -(-_PROGRAMS // (row_tiles * -(-channels // tile.block_channels)))
    longest = depth // (_MIN_STEPS * tile.block_depth)
    cheapest = depth // (_PART_BYTES * row_tiles * tile.block_rows)
    return max(1, min(wanted, longest, cheapest, _MAX_SPLITS))
