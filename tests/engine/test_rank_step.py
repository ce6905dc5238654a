"""A step arrives at a follower as it was decided."""

import numpy as np
import pytest

from engine.execution.ranks.rank_step import decode, encode
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.steps import Row, copy, load, offload, spec, step

MOVES = (copy(8, 1), offload(9, 0), load(0, 3), copy(1, 9))
ROWS = (
    Row(spec("a"), (11, 12, 13), 0, [7, 5, -9, 999], slot=3),
    Row(spec("b"), (14,), 6, [2, 4], slot=0),
)


@pytest.mark.parametrize(
    "work", [step(*ROWS, moves=MOVES), step(*ROWS), step(moves=MOVES), step()], ids=str
)
def test_a_step_is_the_same_on_the_other_side(work: SchedulerOutput) -> None:
    found = decode(encode(work, 4))
    assert found.moves == work.moves
    for name in ("starts", "counts", "token_ids"):
        assert np.array_equal(getattr(found, name), getattr(work, name))
    assert found.block_tables.shape == (work.num_rows, 2 if work.num_rows else 0)
    assert np.array_equal(found.block_tables, work.block_tables[:, : found.block_tables.shape[1]])


def test_what_the_rows_do_not_read_is_not_sent() -> None:
    wide = step(Row(spec(), (11,), 0, list(range(500))))
    assert len(encode(wide, 4)) == 8 * (3 + 3 + 1)
