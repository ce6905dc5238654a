"""Steps for tests, written row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.interface.block_move import BlockMove, MoveKind
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput, SequenceSpec

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@dataclass
class Row:
    """Tokens from position `start` of a sequence whose blocks are `table`."""

    spec: SequenceSpec
    token_ids: Sequence[int]
    start: int
    table: Sequence[int]
    is_sampled: bool = True
    slot: int | None = None
    epoch: int = 0


def spec(
    request_id: str = "r",
    num_prompt_tokens: int = 1,
    sampling: SamplingParams = GREEDY,
    *,
    choice: int = 0,
) -> SequenceSpec:
    return SequenceSpec(request_id, choice, num_prompt_tokens, sampling)


def step(
    *rows: Row,
    moves: Sequence[BlockMove] = (),
    histories: Mapping[int, NDArray[np.int64]] | None = None,
) -> SchedulerOutput:
    """Rows without a slot get their number as their slot."""
    width = max((len(row.table) for row in rows), default=0)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for number, row in enumerate(rows):
        tables[number, : len(row.table)] = row.table
    slots = [number if row.slot is None else row.slot for number, row in enumerate(rows)]
    return SchedulerOutput(
        moves=tuple(moves),
        specs=tuple(row.spec for row in rows),
        slots=np.array(slots, dtype=np.int64),
        epochs=np.array([row.epoch for row in rows], dtype=np.int64),
        starts=np.array([row.start for row in rows], dtype=np.int64),
        counts=np.array([len(row.token_ids) for row in rows], dtype=np.int64),
        token_ids=np.array([t for row in rows for t in row.token_ids], dtype=np.int64),
        block_tables=tables,
        is_sampled=np.array([row.is_sampled for row in rows], dtype=np.bool_),
        histories=histories or {},
    )


def copy(source: int, destination: int) -> BlockMove:
    return BlockMove(MoveKind.COPY, source, destination)


def offload(source: int, destination: int) -> BlockMove:
    return BlockMove(MoveKind.OFFLOAD, source, destination)


def load(source: int, destination: int) -> BlockMove:
    return BlockMove(MoveKind.LOAD, source, destination)
