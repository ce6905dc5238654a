"""Ranks that are processes: they say what one rank says, and none outlives another."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.ranks.follower_process import RankLost
from engine.from_folder import engine_from_folder
from engine.interface.sampling_params import SamplingParams
from engine.kv_cache.swap_cost import SwapCost
from engine.models.config_file import UnsupportedModel
from engine.models.loader import load_decoder
from engine.ranked_engine import ranked_engine
from tests.engine.orders import Transcript, greedy, order, run_to_end
from tests.engine.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

AT_ONCE_S = 1.0
PATIENCE_S = 30
# Twenty-four blocks are about two of the longer sequences below.
SMALL = EngineSettings(
    block_size=4, num_blocks=24, num_host_blocks=16, max_num_batched_tokens=40, chunk_size=16
)
DRIVER = """
import sys
from pathlib import Path
from engine.engine_settings import EngineSettings
from engine.ranked_engine import ranked_engine
from tests.engine.orders import greedy, order

engine = ranked_engine(Path(sys.argv[1]), EngineSettings(num_blocks=64), 2, dtype="float32")
print("ready", flush=True)
while True:
    engine.add(order("a", (5, 6, 7), greedy(50)))
    while engine.has_work:
        engine.step_overlapped()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose three KV heads cannot be shared evenly."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model("llama with odd heads", folder)
    return folder


class Losses:
    """What an engine says of its ranks, and when."""

    def __init__(self) -> None:
        self.all: list[RankLost] = []
        self.came = threading.Event()

    def note(self, loss: RankLost) -> None:
        self.all.append(loss)
        self.came.set()


@contextmanager
def two_ranks(folder: Path, losses: Losses | None = None) -> Iterator[Engine]:
    engine = ranked_engine(
        folder, SMALL, 2, dtype="float32", on_loss=None if losses is None else losses.note
    )
    try:
        yield engine
    finally:
        engine.close()
    assert followers_of(os.getpid()) == []


def followers_of(driver: int) -> list[int]:
    """Process ids of all followers that are children of this process."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == driver and b"engine.execution.ranks.follower" in command:
            found.append(int(folder.name))
    return found


def words(engine: Engine) -> Transcript:
    """Outputs that end early, from which the engine learns to expect no more; then long ones."""
    chooser = random.Random(5)
    shared = tuple(chooser.randrange(3, VOCAB) for _ in range(9))
    transcript = Transcript()
    for i in range(14):
        engine.add(order(f"short {i}", (*shared, 3 + i), greedy(50)))
        engine.step()
        engine.cancel(f"short {i}", is_complete=True)
    run_to_end(engine, transcript, is_overlapped=True)
    for i in range(4):
        tail = tuple(chooser.randrange(3, VOCAB) for _ in range(5 + i))
        chance = SamplingParams(max_tokens=40, temperature=0.8, seed=i, presence_penalty=0.3)
        sampling = chance if i % 2 else greedy(40)
        engine.add(order(f"long {i}", shared + tail, sampling))
    return run_to_end(engine, transcript, is_overlapped=True)


def test_two_ranks_say_what_one_says_with_lost_places_host_blocks_and_shared_prefixes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which is cheaper is measured, and a busy machine may measure either.
    monkeypatch.setattr(SwapCost, "is_offload_cheaper", lambda *_: True)
    one = engine_from_folder(folder, SMALL, dtype="float32")
    expected = words(one)
    one.close()
    with two_ranks(folder) as engine:
        found = words(engine)
        stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.loaded_blocks_total > 0
    assert stats.cached_tokens_total > 0
    assert found.token_ids == expected.token_ids
    assert found.ends == expected.ends


def test_a_follower_that_is_killed_in_a_step_is_reported_at_once_and_ends_the_engine(
    folder: Path,
) -> None:
    losses = Losses()
    with two_ranks(folder, losses) as engine:
        (follower,) = followers_of(os.getpid())
        engine.add(order("a", (5, 6, 7), greedy(80)))
        engine.step_overlapped()
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"Rank 1 \(process {follower}\) was ended by SIGKILL"):
            run_to_end(engine, is_overlapped=True)
        assert losses.came.wait(AT_ONCE_S)
        assert len(losses.all) == 1


def test_a_follower_that_stands_still_in_a_step_is_lost_and_killed(folder: Path) -> None:
    losses = Losses()
    with two_ranks(folder, losses) as engine:
        # Until there are a few steps to measure against, one may take long.
        engine.add(order("a", (5, 6, 7), greedy(12)))
        run_to_end(engine)
        (follower,) = followers_of(os.getpid())
        os.kill(follower, signal.SIGSTOP)
        engine.add(order("b", (5, 6, 8), greedy(12)))
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"A step of 2 ranks began .* and has not ended"):
            run_to_end(engine)
        assert time.monotonic() - began < 1.0 + AT_ONCE_S
        assert followers_of(os.getpid()) == []


def test_a_driver_that_is_killed_takes_its_followers_along(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        (follower,) = followers_of(driver.pid)
        descriptor = os.pidfd_open(follower)
        try:
            driver.kill()
            assert select.select([descriptor], [], [], AT_ONCE_S)[0], "the follower lives on"
        finally:
            os.close(descriptor)


def test_a_follower_that_cannot_load_says_why_and_leaves_no_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "model.safetensors", tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)
    # The driver alone does not mind.
    monkeypatch.setattr(
        "engine.ranked_engine.load_decoder",
        lambda _folder, dtype, shard: load_decoder(folder, dtype, shard),
    )
    with pytest.raises(RankLost, match=r"Rank 1 .* failed: UnsupportedModel: .*not a readable"):
        ranked_engine(tmp_path, SMALL, 2, dtype="float32")
    assert followers_of(os.getpid()) == []


def test_more_ranks_than_kv_heads_are_refused_before_anything_starts(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"3 KV heads, and each rank .* Use at most 3 ranks"):
        ranked_engine(folder, SMALL, 4, dtype="float32")
