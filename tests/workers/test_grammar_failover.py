"""A grammar goes on elsewhere where it was: from the log of what was delivered, nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from control.streams.messages import Assignment, pack_request, unpack_request
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.from_folder import engine_from_folder
from engine.interface.generation_delta import FinishReason, GenerationDelta
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.grammar import Grammar
from engine.interface.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.small_model import write_small_model
from workers.delivery import Delivery
from workers.request_times import Received

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "tags": {"type": "array", "items": {"enum": ["x", "größe", None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
NUM_CHOICES = 2
REQUEST = GenerationRequest(
    "r" * 26,
    ((1, 30, 31, 32),),
    SamplingParams(
        300, temperature=1.5, seed=3, n=NUM_CHOICES, grammar=Grammar.json_schema(SCHEMA)
    ),
    PriorityClass.INTERACTIVE,
    "scope",
    0.0,
    1e12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_small_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = engine_from_folder(folder, EngineSettings(num_blocks=128), dtype="float32")
    yield engine
    engine.close()
    torch.set_num_threads(num_threads)


def attempt(
    engine: Engine, tokenizer: Tokenizer, log: list[GenerationDelta], most_steps: int
) -> list[GenerationDelta]:
    """What one replica delivers after the log, until it dies or all is said."""
    request = unpack_request(pack_request(REQUEST))
    delivery = Delivery(Assignment("r" * 26, 1, "d", request), tokenizer, log, Received(0.0, 0.0))
    engine.add(delivery.resumed_request())
    delivered: list[GenerationDelta] = []
    while engine.has_work and most_steps:
        most_steps -= 1
        for update in engine.step():
            delta = delivery.take(update, 0.0)
            if delta is not None:
                delivered.append(delta)
    engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
    return delivered


def said(log: list[GenerationDelta], choice: int) -> str:
    return "".join(delta.text for delta in log if delta.choice == choice)


def test_whoever_goes_on_from_the_log_ends_with_the_same_valid_text(
    engine: Engine, folder: Path
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    whole = attempt(engine, tokenizer, [], 1000)
    texts = [said(whole, choice) for choice in range(NUM_CHOICES)]
    for text in texts:
        assert set(json.loads(text)) == {"name", "tags"}
    for num_steps in range(1, len(whole) // NUM_CHOICES, 4):
        log = attempt(engine, tokenizer, [], num_steps)
        assert log
        # The second replica dies too, a few steps later.
        log += attempt(engine, tokenizer, log, 3)
        log += attempt(engine, tokenizer, log, 1000)
        assert [said(log, choice) for choice in range(NUM_CHOICES)] == texts
        assert [delta.serial for delta in log] == list(range(len(log)))
        ends = [delta.finish_reason for delta in log if delta.finish_reason is not None]
        assert ends == [FinishReason.STOP] * NUM_CHOICES
