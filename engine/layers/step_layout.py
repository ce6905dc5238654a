"""Where the tokens of a step stand: their rows, positions and KV slots, all as arrays.

A step of hundreds of rows is laid out without a Python loop over them. Numpy only, so that
whoever computes nothing (the scripted model) can use it without torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Row r is tokens offsets[r] .. offsets[r + 1] - 1 of the step, from position starts[r] on.

    `rows`, `positions` and `slots` have one entry per token. `num_blocks[r]` is how many
    entries of `block_tables[r]` count; what stands behind them means nothing.
    """

    starts: Ints
    counts: Ints
    block_tables: NDArray[np.int32]
    num_blocks: Ints
    offsets: Ints
    rows: Ints
    positions: Ints
    slots: Ints


def step_layout(
    starts: Ints, counts: Ints, block_tables: NDArray[np.int32], block_size: int
) -> StepLayout:
    """Lay out rows of `counts` tokens from positions `starts`, in the blocks of their tables."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(offsets[-1]) + (starts - offsets[:-1])[rows]
    blocks = block_tables[rows, positions // block_size].astype(np.int64)
    return StepLayout(
        starts=starts,
        counts=counts,
        block_tables=block_tables,
        num_blocks=-(-(starts + counts) // block_size),
        offsets=offsets,
        rows=rows,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
    )
