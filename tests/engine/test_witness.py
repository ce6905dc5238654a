"""The witness of all schedules notices what words alone would not show."""

from dataclasses import replace

import pytest

from engine.scheduling.scheduler_output import SequenceSpec
from tests.engine.hash_runner import words_alone
from tests.engine.orders import greedy, order
from tests.engine.steps import Row, copy, load, offload, step
from tests.engine.witness import Witness

PROMPT = (1, 2, 1, 2, 2, 1)


def witness_of(*names: str, scope: str = "a") -> tuple[Witness, dict[str, SequenceSpec]]:
    """Blocks 0, 1 and 2 hold what "writer" computed: its prompt, four tokens to a block."""
    witness = Witness(num_blocks=8, block_size=4, num_host_blocks=2)
    specs = {}
    for name in ("writer", *names):
        request = order(name, PROMPT, greedy(3), cache_scope="a" if name == "writer" else scope)
        witness.expect(request)
        specs[name] = SequenceSpec(name, 0, len(PROMPT), request.sampling)
    witness.execute(step(Row(specs["writer"], PROMPT, 0, (0, 1))))
    return witness, specs


def test_the_right_kv_may_be_read_wherever_it_was_moved() -> None:
    witness, specs = witness_of("reader")
    row = Row(specs["reader"], PROMPT[4:], 4, (6, 5), slot=1)
    moves = (offload(0, 1), copy(1, 5), load(1, 6))
    result = witness.execute(step(row, moves=moves))
    assert result.token_ids.tolist() == words_alone(PROMPT, 1)


def test_equal_tokens_of_another_scope_are_noticed() -> None:
    witness, specs = witness_of("reader", scope="b")
    with pytest.raises(AssertionError, match=r"at position 0 of 4\.\.6 .* KV of \(.writer."):
        witness.execute(step(Row(specs["reader"], PROMPT[4:], 4, (0, 5), slot=1)))


def test_equal_tokens_after_another_beginning_are_noticed() -> None:
    witness, specs = witness_of()
    witness.expect(order("reader", (9, 9, 9, 9, *PROMPT), greedy(3)))
    reader = replace(specs["writer"], request_id="reader", num_prompt_tokens=10)
    first = Row(reader, (9, 9, 9, 9), 0, (4,), is_sampled=False, slot=1)
    witness.execute(step(first))
    with pytest.raises(AssertionError, match=r"at position 4 of 8\.\.10 .* KV of \(.writer."):
        witness.execute(step(Row(reader, PROMPT[4:], 8, (4, 0, 5), slot=1)))


def test_what_a_failed_row_wrote_is_for_nobody() -> None:
    witness, specs = witness_of()
    for name in ("faulty", "late"):
        faults = [(0, 1)] if name == "faulty" else []
        witness.expect(order(name, (7, 7, *PROMPT), greedy(3), cache_scope="a"), faults)
    faulty = replace(specs["writer"], request_id="faulty", num_prompt_tokens=8)
    late = replace(faulty, request_id="late")
    witness.execute(step(Row(faulty, (7, 7, *PROMPT[:2]), 0, (4,), is_sampled=False, slot=1)))
    with pytest.raises(AssertionError, match="failed"):
        witness.execute(step(Row(late, PROMPT[2:], 4, (4, 5), slot=2)))


def test_a_sequence_that_is_over_stops_within_a_step() -> None:
    witness, specs = witness_of()
    witness.is_over(("writer", 0))
    words = words_alone(PROMPT, 2)
    witness.execute(step(Row(specs["writer"], words[:1], 6, (0, 1))))
    with pytest.raises(AssertionError, match="2 steps after its end"):
        witness.execute(step(Row(specs["writer"], words[1:], 7, (0, 1))))


def test_a_sequence_that_comes_back_a_fourth_time_is_noticed() -> None:
    witness, specs = witness_of()
    for epoch in range(1, 4):
        witness.execute(step(Row(specs["writer"], PROMPT, 0, (0, 1), epoch=epoch)))
    with pytest.raises(AssertionError, match="preempted too often"):
        witness.execute(step(Row(specs["writer"], PROMPT, 0, (0, 1), epoch=4)))
