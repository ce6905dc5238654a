"""Which tile of attention a program computes, by GPU and head size: data, not search.

Nothing is tuned while requests wait. Heads are padded to 16 times a power of two. A chunk's tile is
as high as registers let it be, for its products are what takes time; a decode's is as low as
tensor cores allow, for reading keys and values is what takes time, and its depth is what keeps
many reads under way. Both must fit into shared memory: 227 KiB on compute capability 9.0 and
10.0, 99 KiB on the least of the others. Not yet measured on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Work(Enum):
    """What a program's queries are: a run of one sequence's tokens, or a single one."""

    CHUNK = "chunk"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Query rows (tokens x heads of a group) and keys of one step of one program."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


# The least height of a product on tensor cores.
MIN_ROWS = 16
# Programs that fill a large GPU twice over: 132 multiprocessors on an H100.
_PROGRAMS = 264
_MAX_SPLITS = 32
# A part of a context that is shorter than so many tiles costs more to merge than it saves.
_MIN_TILES = 4

# By padded head size. A decode's tile is as high as its group, and at least MIN_ROWS.
Tiles = Mapping[int, AttentionTile]

_LARGE: Mapping[Work, Tiles] = {
    Work.CHUNK: {
        16: AttentionTile(128, 128, num_warps=8, num_stages=3),
        32: AttentionTile(128, 128, num_warps=8, num_stages=3),
        64: AttentionTile(128, 128, num_warps=8, num_stages=3),
        128: AttentionTile(128, 64, num_warps=8, num_stages=3),
        256: AttentionTile(128, 32, num_warps=8, num_stages=3),
    },
    Work.DECODE: {
        16: AttentionTile(MIN_ROWS, 128, num_warps=4, num_stages=4),
        32: AttentionTile(MIN_ROWS, 128, num_warps=4, num_stages=4),
        64: AttentionTile(MIN_ROWS, 128, num_warps=4, num_stages=4),
        128: AttentionTile(MIN_ROWS, 64, num_warps=4, num_stages=4),
        256: AttentionTile(MIN_ROWS, 32, num_warps=4, num_stages=4),
    },
}
_SMALL: Mapping[Work, Tiles] = {
    Work.CHUNK: {
        16: AttentionTile(128, 64, num_warps=4, num_stages=3),
        32: AttentionTile(128, 64, num_warps=4, num_stages=3),
        64: AttentionTile(128, 64, num_warps=8, num_stages=3),
        128: AttentionTile(128, 64, num_warps=8, num_stages=2),
        256: AttentionTile(64, 32, num_warps=8, num_stages=2),
    },
    Work.DECODE: {
        16: AttentionTile(MIN_ROWS, 64, num_warps=4, num_stages=4),
        32: AttentionTile(MIN_ROWS, 64, num_warps=4, num_stages=4),
        64: AttentionTile(MIN_ROWS, 64, num_warps=4, num_stages=4),
        128: AttentionTile(MIN_ROWS, 64, num_warps=4, num_stages=2),
        256: AttentionTile(MIN_ROWS, 32, num_warps=4, num_stages=2),
    },
}
# Float32 is for comparing, not for serving: one tile that fits everywhere.
_FLOAT32 = AttentionTile(MIN_ROWS, 16, num_warps=4, num_stages=2)
_LARGE_SHARED_MEMORY = ((9, 0), (10, 0))


def attention_tile(
    work: Work, block_dim: int, element_bytes: int, capability: tuple[int, int]
) -> AttentionTile:
    """The tile for queries of so many bytes an element, whose heads are padded to `block_dim`."""
    if element_bytes > 2:
        return _FLOAT32
    return (_LARGE if capability in _LARGE_SHARED_MEMORY else _SMALL)[work][block_dim]


def num_splits(tile: AttentionTile, programs: int, longest: int) -> int:
    """Over how many programs each decode's context is spread, to have enough of them.

    `programs` is how many there are unsplit, and `longest` the longest context's tokens. A power
    of two, so that few kernels are compiled.
    """
    room = min(_PROGRAMS // programs, longest // (_MIN_TILES * tile.block_keys), _MAX_SPLITS)
    return 1 << (max(room, 1).bit_length() - 1)
