"""What every runner does with moves, chunks and shared blocks: one suite for all of them.

A sequence's words are those that the same runner says when the sequence runs alone, in one
chunk, in blocks that nobody else ever used.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.execution.model_runner import ModelRunner
from engine.execution.runner import ModelLimits, Runner
from engine.execution.scripted_runner import ScriptedRunner
from engine.interface.block_move import BlockMove
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from tests.engine.hash_runner import HashRunner
from tests.engine.oracle import write_tiny_llama
from tests.engine.steps import Row, copy, load, offload, spec, step

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 6
COUNT = 6
A, B = (11, 12, 13, 14, 15, 16, 17, 18, 19), (21, 22, 23, 24, 25, 26, 27)

Build = Callable[[], Runner]
Alone = dict[tuple[int, ...], list[int]]


class Speaker:
    """One sequence: the words so far, and the blocks in which its KV lies."""

    def __init__(self, prompt: tuple[int, ...], table: list[int], slot: int = 0) -> None:
        self.spec = spec(str(prompt), len(prompt))
        self.table = table
        self.slot = slot
        self.context = list(prompt)
        self.num_computed = 0

    @property
    def words(self) -> list[int]:
        return self.context[self.spec.num_prompt_tokens :]

    def row(self, size: int = 10_000) -> Row:
        """The next tokens, at most `size` of them."""
        chunk = self.context[self.num_computed : self.num_computed + size]
        is_sampled = self.num_computed + len(chunk) == len(self.context)
        return Row(self.spec, chunk, self.num_computed, self.table, is_sampled, self.slot)

    def moved_to(self, table: list[int], slot: int) -> "Speaker":
        """Another sequence that goes on from the same KV in other blocks."""
        other = Speaker(tuple(self.context[: self.spec.num_prompt_tokens]), table, slot)
        other.context, other.num_computed = list(self.context), self.num_computed
        return other


def run(
    runner: Runner, *speakers: Speaker, size: int = 10_000, moves: tuple[BlockMove, ...] = ()
) -> None:
    """One step of all these speakers."""
    work = step(*(speaker.row(size) for speaker in speakers), moves=moves)
    output = runner.execute(work)
    assert not output.errors
    for speaker, row, token_id in zip(
        speakers, work.sequences(BLOCK_SIZE), output.token_ids.tolist(), strict=True
    ):
        speaker.num_computed = row.end
        assert (token_id >= 0) == row.is_sampled
        if row.is_sampled:
            speaker.context.append(token_id)


def finish(runner: Runner, *speakers: Speaker, size: int = 10_000) -> None:
    while any(len(speaker.words) < COUNT for speaker in speakers):
        run(runner, *(s for s in speakers if len(s.words) < COUNT), size=size)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return load_decoder(folder, "float32")


@pytest.fixture(scope="module", params=["hash", "scripted", "model"])
def build(request: pytest.FixtureRequest, decoder: Decoder) -> Build:
    sizes = NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS
    limits = ModelLimits(1000, 1000, frozenset({2}))
    builds: dict[str, Build] = {
        "hash": lambda: HashRunner(*sizes),
        "scripted": lambda: ScriptedRunner(limits, *sizes),
        "model": lambda: ModelRunner(decoder, *sizes),
    }
    return builds[request.param]


@pytest.fixture
def runner(build: Build) -> Runner:
    return build()


@pytest.fixture(scope="module")
def alone(build: Build) -> Alone:
    words: Alone = {}
    for prompt in (A, B):
        speaker = Speaker(prompt, [0, 1, 2, 3])
        finish(build(), speaker)
        words[prompt] = speaker.words
    assert words[A] != words[B]
    return words


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_chunks_of_any_size_give_the_same_words(runner: Runner, alone: Alone, size: int) -> None:
    a = Speaker(A, [9, 3, 17, 0])
    finish(runner, a, size=size)
    assert a.words == alone[A]


def test_rows_do_not_hear_each_other(runner: Runner, alone: Alone) -> None:
    a, b = Speaker(A, [9, 0, 17, 5], slot=0), Speaker(B, [1, 23, 2, 6], slot=1)
    run(runner, a, size=5)
    finish(runner, b, a, size=3)
    assert a.words == alone[A]
    assert b.words == alone[B]


@pytest.mark.parametrize("num_warm", [1, 5])
def test_a_suffix_behind_blocks_that_another_row_wrote_says_the_same(
    runner: Runner, alone: Alone, num_warm: int
) -> None:
    first = Speaker(A, [8, 9, 10, 11])
    finish(runner, first)
    warm = [Speaker(A, [8, 9, 12 + 2 * i, 13 + 2 * i], slot=1 + i) for i in range(num_warm)]
    for speaker in warm:
        speaker.num_computed = 2 * BLOCK_SIZE
    finish(runner, *warm)
    assert [speaker.words for speaker in warm] == [alone[A]] * num_warm


@pytest.mark.parametrize("length", [4, 6, 7, 8])
def test_a_fork_writes_into_its_own_copy(runner: Runner, alone: Alone, length: int) -> None:
    first = Speaker(A, [8, 9, 10, 11], slot=0)
    run(runner, first, size=length)
    last = (length - 1) // BLOCK_SIZE
    table = [8, 9, 10, 11][:last] + [12 + i for i in range(4 - last)]
    fork = first.moved_to(table, slot=1)
    # The fork goes another way in the rest of its prompt; the first must not notice.
    fork.context[length:] = [30 + i for i in range(len(A) - length)]
    run(runner, first, fork, moves=(copy(8 + last, 12),))
    finish(runner, first, fork)
    assert first.words == alone[A]


def test_moves_happen_in_their_order_each_on_what_was_left(runner: Runner, alone: Alone) -> None:
    a, b = Speaker(A, [8, 9, 10], slot=0), Speaker(B, [4, 5, 6], slot=1)
    run(runner, a, b)
    # b's blocks go away first, a's then take their places, and b's come back in a's.
    moves = (
        *(copy(4, 16), copy(5, 17)),
        *(copy(8, 4), copy(9, 5), copy(10, 6)),
        *(copy(16, 8), copy(17, 9)),
    )
    a, b = a.moved_to([4, 5, 6, 7], slot=2), b.moved_to([8, 9, 10, 11], slot=3)
    run(runner, a, b, moves=moves)
    finish(runner, a, b)
    assert a.words == alone[A]
    assert b.words == alone[B]


def test_a_chain_of_copies_carries_the_first_blocks_content(runner: Runner, alone: Alone) -> None:
    a = Speaker(A, [8, 9, 10])
    run(runner, a)
    moves = (copy(8, 20), copy(20, 21), copy(21, 22), copy(9, 20), copy(10, 21))
    a = a.moved_to([22, 20, 21, 3], slot=1)
    run(runner, a, moves=moves)
    finish(runner, a)
    assert a.words == alone[A]


def test_what_went_to_the_host_comes_back_after_its_blocks_were_overwritten(
    runner: Runner, alone: Alone
) -> None:
    a, b = Speaker(A, [8, 9, 10]), Speaker(B, [10, 8, 9, 11], slot=1)
    run(runner, a)
    # The blocks leave in the very step in which b overwrites them.
    run(runner, b, moves=(offload(8, 5), offload(9, 0), offload(10, 3)))
    finish(runner, b)
    a = a.moved_to([2, 8, 1, 3], slot=2)
    run(runner, a, moves=(load(5, 2), load(0, 8), load(3, 1)))
    finish(runner, a)
    assert a.words == alone[A]
    assert b.words == alone[B]


def test_a_block_goes_to_the_host_and_back_in_one_step(runner: Runner, alone: Alone) -> None:
    a = Speaker(A, [8, 9, 10])
    run(runner, a)
    moves = (offload(8, 1), copy(9, 8), load(1, 9), offload(8, 1), load(1, 20))
    a = a.moved_to([9, 20, 10, 3], slot=1)
    run(runner, a, moves=moves)
    finish(runner, a)
    assert a.words == alone[A]


def test_a_step_may_have_moves_and_no_rows(runner: Runner, alone: Alone) -> None:
    a = Speaker(A, [8, 9, 10])
    run(runner, a)
    output = runner.execute(step(moves=(offload(9, 2), load(2, 14))))
    assert output.token_ids.shape == (0,)
    assert not output.errors
    a = a.moved_to([8, 14, 10, 3], slot=1)
    finish(runner, a)
    assert a.words == alone[A]


def test_unused_entries_of_a_table_mean_nothing(runner: Runner, alone: Alone) -> None:
    a, b = Speaker(A, [8, 9, 10, 11, 999, -7], slot=0), Speaker(B, [4, 5, 6, 7], slot=1)
    run(runner, a, b)
    finish(runner, a, b)
    assert a.words == alone[A]
    assert b.words == alone[B]
