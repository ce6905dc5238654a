import numpy as np

from engine.execution.model_runner_output import NO_TOKEN
from engine.scheduling.scheduler_output import PENDING
from tests.engine.steps import Row, copy, spec, step


def test_rows_come_out_as_they_were_put_in() -> None:
    long, short = spec("long", 9), spec("short", 2, choice=3)
    work = step(
        Row(long, (11, 12, 13, 14, 15), 4, (7, 2, 5), is_sampled=False),
        Row(short, (21,), 2, (3,)),
    )
    first, second = work.sequences(4)
    assert (first.request_id, first.choice, first.token_ids) == ("long", 0, (11, 12, 13, 14, 15))
    assert (first.start, first.end, first.block_table) == (4, 9, (7, 2, 5))
    assert not first.is_sampled
    assert (second.request_id, second.choice, second.token_ids) == ("short", 3, (21,))
    assert (second.start, second.end, second.block_table) == (2, 3, (3,))
    assert second.is_sampled
    assert second.num_output_tokens == 1
    assert work.num_rows == 2
    assert work.num_tokens == 6


def test_a_rows_table_ends_with_the_block_of_its_last_token() -> None:
    work = step(
        Row(spec(), (1,) * 4, 0, (7, 8, 9)),
        Row(spec(), (1,) * 5, 0, (1, 2, 3)),
        Row(spec(), (1,), 4, (4, 5, 6)),
    )
    assert [row.block_table for row in work.sequences(4)] == [(7,), (1, 2), (4, 5)]


def test_a_step_of_moves_alone_is_not_empty() -> None:
    assert step().is_empty
    assert not step(moves=[copy(1, 2)]).is_empty
    assert step(moves=[copy(1, 2)]).sequences(4) == ()
    assert not step(Row(spec(), (1,), 0, (0,))).is_empty


def test_pending_tokens_come_from_the_same_slot_of_the_step_before() -> None:
    before = step(
        Row(spec("a"), (1, 2), 0, (0,), slot=5),
        Row(spec("b"), (3,), 0, (1,), slot=0),
        Row(spec("c"), (4,), 0, (2,), slot=2),
    )
    work = step(
        Row(spec("c"), (PENDING,), 1, (2,), slot=2),
        Row(spec("new"), (8, 9), 0, (3,), slot=7),
        Row(spec("a"), (PENDING,), 2, (0,), slot=5),
    )
    filled = work.with_sampled(before, np.array([50, 51, 52]))
    assert filled.token_ids.tolist() == [52, 8, 9, 50]
    assert work.token_ids.tolist() == [PENDING, 8, 9, PENDING]
    assert filled.specs is work.specs
    assert filled.slots is work.slots


def test_a_step_without_pending_tokens_stays_itself() -> None:
    work = step(Row(spec(), (8, 9), 0, (3,)))
    assert work.with_sampled(step(), np.array([], dtype=np.int64)) is work
    moves = step(moves=[copy(1, 2)])
    assert moves.with_sampled(work, np.array([5])) is moves


def test_what_follows_a_failed_row_is_some_token_of_the_vocabulary() -> None:
    before = step(Row(spec("a"), (1,), 0, (0,)), Row(spec("b"), (1,), 0, (1,)))
    work = step(Row(spec("a"), (PENDING,), 1, (0,)), Row(spec("b"), (PENDING,), 1, (1,)))
    filled = work.with_sampled(before, np.array([NO_TOKEN, 6])).token_ids.tolist()
    assert filled[0] >= 0
    assert filled[1] == 6
