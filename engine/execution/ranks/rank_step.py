"""What a follower is told of a step: one run of 64-bit integers.

    moves, rows, width | kind, source, destination ... | starts | counts | token ids | block tables

Words are chosen by the driver alone, so nothing that serves to choose them is sent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.interface.block_move import BlockMove, MoveKind
from engine.scheduling.scheduler_output import SchedulerOutput

_KINDS = tuple(MoveKind)


@dataclass(frozen=True, slots=True, eq=False)
class RankStep:
    """The fields of a SchedulerOutput that every rank needs; see there."""

    moves: tuple[BlockMove, ...]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    block_tables: NDArray[np.int32]


def encode(work: SchedulerOutput, block_size: int) -> bytes:
    """The step's frame, with as much of the block tables as means something."""
    width = -(-int(work.ends.max(initial=0)) // block_size)
    moves = [
        number
        for kind, source, destination in work.moves
        for number in (_KINDS.index(kind), source, destination)
    ]
    numbers: list[NDArray[np.int64]] = [
        np.array([len(work.moves), work.num_rows, width, *moves], dtype=np.int64),
        work.starts,
        work.counts,
        work.token_ids,
        work.block_tables[:, :width].astype(np.int64).ravel(),
    ]
    return np.concatenate(numbers).tobytes()


def decode(frame: bytes) -> RankStep:
    """The step of a frame."""
    numbers = np.frombuffer(frame, dtype=np.int64).copy()
    num_moves, num_rows, width = numbers[:3].tolist()
    num_tokens = len(numbers) - 3 - 3 * num_moves - (2 + width) * num_rows
    lengths = (3, 3 * num_moves, num_rows, num_rows, num_tokens)
    _, moves, starts, counts, token_ids, tables = np.split(numbers, np.cumsum(lengths))
    return RankStep(
        moves=tuple(
            BlockMove(_KINDS[kind], source, destination)
            for kind, source, destination in moves.reshape(-1, 3).tolist()
        ),
        starts=starts,
        counts=counts,
        token_ids=token_ids,
        block_tables=tables.reshape(num_rows, width).astype(np.int32),
    )
