"""What is on its way counts as the engine expects it, and no promise exceeds what is left."""

import time
from pathlib import Path

import pytest

from control.streams.messages import Assignment
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from workers.delivery import Delivery
from workers.delivery_table import MAX_SCOPES, DeliveryTable, TableLoad, kv_tokens_free
from workers.request_times import Received
from workers.scripted_model import make_scripted_model

BLOCK_SIZE = 16


def half_of_the_most(request: GenerationRequest) -> int:
    """As if requests used half of what they may."""
    return request.max_kv_tokens // 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """The scripted model's."""
    return Tokenizer.from_folder(make_scripted_model(tmp_path))


def delivery(
    request_id: str,
    tokenizer: Tokenizer,
    *,
    n: int = 1,
    scope: str = "scope",
    priority_class: PriorityClass = PriorityClass.INTERACTIVE,
) -> Delivery:
    """An attempt of a request with 20 prompt tokens and at most 80 more for each choice."""
    request = GenerationRequest(
        request_id=request_id,
        prompts=((1,) * 20,),
        sampling=SamplingParams(max_tokens=80, n=n),
        priority_class=priority_class,
        cache_scope=scope,
        arrival=0.0,
        deadline_at=float("inf"),
    )
    assignment = Assignment(request_id, 1, "digest", request)
    return Delivery(assignment, tokenizer, [], Received(0.0, time.monotonic()))


def test_a_class_is_counted_alone_when_asked_for(tokenizer: Tokenizer) -> None:
    table = DeliveryTable(BLOCK_SIZE, half_of_the_most)
    table.add(delivery("a", tokenizer))
    table.add(delivery("b", tokenizer, n=3, priority_class=PriorityClass.BATCH))
    interactive = table.load(0, PriorityClass.INTERACTIVE)
    assert interactive == TableLoad(50 + BLOCK_SIZE, 1, "0-0")
    assert table.load(0).num_sequences == 4


def test_what_does_not_run_yet_counts_as_the_engine_expects_it_and_a_block_for_each_sequence(
    tokenizer: Tokenizer,
) -> None:
    table = DeliveryTable(BLOCK_SIZE, half_of_the_most)
    table.add(delivery("a", tokenizer))
    table.add(delivery("b", tokenizer, n=3))
    table.note_order("7-0")
    assert table.load(num_running=0) == TableLoad(50 + 150 + 4 * BLOCK_SIZE, 4, "7-0")
    table.remove("a")
    table.remove("b")
    assert table.load(num_running=0) == TableLoad(0, 0, "7-0")


@pytest.mark.parametrize(
    ("num_running", "unjoined_kv_tokens"), [(1, 150 + 3 * 16), (2, 150 + 3 * 16), (4, 0), (5, 0)]
)
def test_the_oldest_are_those_that_run_and_a_request_of_which_a_part_runs_counts_whole(
    tokenizer: Tokenizer, num_running: int, unjoined_kv_tokens: int
) -> None:
    table = DeliveryTable(BLOCK_SIZE, half_of_the_most)
    table.add(delivery("a", tokenizer))
    table.add(delivery("b", tokenizer, n=3))
    assert table.load(num_running).unjoined_kv_tokens == unjoined_kv_tokens


def test_a_request_counts_from_its_assignment_on(tokenizer: Tokenizer) -> None:
    table = DeliveryTable(BLOCK_SIZE, half_of_the_most)
    table.add(delivery("a", tokenizer))
    # The engine has not seen it yet and calls everything free.
    assert kv_tokens_free(1024, table.load(num_running=0), 1024) == 1024 - 50 - BLOCK_SIZE


def test_of_what_runs_the_engine_knows_best() -> None:
    assert kv_tokens_free(1024, TableLoad(0, 9, "0-0"), 700) == 700
    assert kv_tokens_free(1024, TableLoad(100, 9, "0-0"), 700) == 600


@pytest.mark.parametrize("projected_free", [0, 500])
def test_free_room_is_never_negative(projected_free: int) -> None:
    assert kv_tokens_free(1024, TableLoad(5000, 3, "0-0"), projected_free) == 0


def test_an_idle_replica_is_all_free() -> None:
    assert kv_tokens_free(1024, TableLoad(0, 0, "0-0"), 992) == 1024


def test_the_scopes_that_asked_last_are_remembered(tokenizer: Tokenizer) -> None:
    table = DeliveryTable(BLOCK_SIZE, half_of_the_most)
    for number in range(MAX_SCOPES):
        table.add(delivery(f"r{number}", tokenizer, scope=f"scope {number}"))
    table.add(delivery("again", tokenizer, scope="scope 0"))
    table.remove("again")
    table.add(delivery("new", tokenizer, scope="new"))
    scopes = table.recent_scopes()
    assert len(scopes) == MAX_SCOPES
    assert "scope 1" not in scopes
    assert scopes[-2:] == ("scope 0", "new")
