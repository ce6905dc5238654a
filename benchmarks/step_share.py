"""What a step costs beside the model: deciding, detokenising and publishing.

A real engine runs on its thread, a real publisher on its own, against a real Valkey, as in a
replica. Once all sequences decode, the processor time of the two threads is set against the
wall's: on a small machine they take it from the model, wherever they overlap with it.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import sqlalchemy

from benchmarks.assigned_requests import assign_requests, stream_request
from benchmarks.offline_work import random_prompts
from benchmarks.process_tree import thread_cpu_seconds
from benchmarks.valkey_process import ValkeyProcess, running_valkey
from control.metering.step_log import StepLog
from control.streams.keys import ModelKeys
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer
from workers.delivery import Delivery
from workers.delivery_table import DeliveryTable
from workers.publisher import Publisher
from workers.request_times import Received
from workers.settler import Settler

MAX_SHARE = 0.05
KEYS = ModelKeys("bench")
REPLICA = "replica"
POLL_S = 0.005
LIMIT_S = 120.0
# Nothing ends while it is measured, so that no ledger is needed.
SPARE_STEPS = 64


@dataclass(frozen=True, slots=True)
class StepLoad:
    """How many sequences decode, from prompts of which length, and for how many steps."""

    num_sequences: int = 64
    prompt_tokens: int = 128
    num_steps: int = 128


@dataclass(frozen=True, slots=True)
class StepShare:
    """Milliseconds per step: by the wall, and of processor time by thread."""

    load: StepLoad
    step_ms: float
    engine_ms: float
    publisher_ms: float

    @property
    def share(self) -> float:
        """Of a step's time, what is not the model."""
        return (self.engine_ms + self.publisher_ms) / self.step_ms

    @property
    def is_met(self) -> bool:
        """Whether the share is within its bar."""
        return self.share <= MAX_SHARE

    def table(self) -> str:
        """The measurement in words."""
        return "\n".join(
            [
                f"a step of {self.load.num_sequences} sequences, ms",
                f"  by the wall                     {self.step_ms:7.2f}",
                f"  schedule and update, CPU        {self.engine_ms:7.3f}",
                f"  detokenise and publish, CPU     {self.publisher_ms:7.3f}",
                f"  share of the step               {self.share:7.1%}   (bar {MAX_SHARE:.0%})",
            ]
        )


def measure(engine: Engine, tokenizer: Tokenizer, load: StepLoad) -> StepShare:
    """Run the load on an engine that computes on a thread of its own; the engine is closed."""
    with running_valkey() as valkey, _replica(engine, tokenizer, load, valkey) as loop:
        threads = [_native_id("engine"), _native_id("publisher")]
        _wait_until(lambda: loop.stats().waiting == 0 and loop.stats().running > 0)
        # All have been let in; the last of them may still compute their prompts.
        _wait_for_step(loop, loop.stats().steps_total + SPARE_STEPS // 4)
        began = loop.stats().steps_total
        wall, cpu = time.perf_counter(), [thread_cpu_seconds(thread) for thread in threads]
        _wait_for_step(loop, began + load.num_steps)
        num_steps = loop.stats().steps_total - began
        wall_s = time.perf_counter() - wall
        engine_s, publisher_s = (
            thread_cpu_seconds(thread) - before for thread, before in zip(threads, cpu, strict=True)
        )
        assert loop.stats().running == load.num_sequences, "the load was not steady"
    per_step = 1000 / num_steps
    return StepShare(load, wall_s * per_step, engine_s * per_step, publisher_s * per_step)


@contextmanager
def _replica(
    engine: Engine, tokenizer: Tokenizer, load: StepLoad, valkey: ValkeyProcess
) -> Iterator[EngineLoop]:
    """The part of a replica that speaks, with all sequences submitted."""
    loop = EngineLoop(engine)
    table = DeliveryTable(engine.settings.block_size, loop.expected_tokens)
    # It is never connected: no request ends.
    database = sqlalchemy.create_engine("postgresql+psycopg://")
    settler = Settler(valkey.client, database, KEYS, REPLICA)
    folder = tempfile.TemporaryDirectory()
    steps = StepLog(Path(folder.name), REPLICA, KEYS.model)
    publisher = Publisher(valkey.client, KEYS, (loop, table, settler), steps)
    output = load.num_steps + 4 * SPARE_STEPS + load.num_sequences
    prompts = random_prompts(load.num_sequences, load.prompt_tokens, Random(1))
    requests = (
        (stream_request(f"{number:026d}", prompt, output), "gateway")
        for number, prompt in zip(itertools.count(), prompts, strict=False)
    )
    assignments = assign_requests(valkey.client, KEYS, REPLICA, requests)
    loop.start()
    publisher.start()
    try:
        for assignment in assignments:
            delivery = Delivery(assignment, tokenizer, [], Received(0.0, time.monotonic()))
            table.add(delivery)
            loop.try_submit(delivery.resumed_request())
        yield loop
    finally:
        loop.stop(LIMIT_S)
        publisher.join(LIMIT_S)
        steps.close()
        folder.cleanup()
        database.dispose()


def _native_id(name: str) -> int:
    found = [thread.native_id for thread in threading.enumerate() if thread.name == name]
    assert len(found) == 1, f"threads called {name}: {found}"
    assert found[0] is not None
    return found[0]


def _wait_for_step(loop: EngineLoop, number: int) -> None:
    _wait_until(lambda: loop.stats().steps_total >= number or not loop.is_alive)
    if not loop.is_alive:
        raise RuntimeError("The engine died.") from loop.failure


def _wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > give_up:
            raise RuntimeError(f"The load was not there within {LIMIT_S:g} s")
        time.sleep(POLL_S)
