"""What a replica makes of its settings, and how it ends when a rank does."""

import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control.registry.manifest import write_manifest
from control.registry.model_version import ModelVersion
from control.streams.clock import SharedClock
from tests.engine.test_ranked_engine import followers_of
from tests.engine.tiny_models import MAX_POSITIONS, write_tiny_model
from workers.replica_engine import RANK_LOST_STATUS, load_engine
from workers.scripted_model import make_scripted_model
from workers.settings import ReplicaSettings

AT_ONCE_S = 1.0
REPLICA = """
import sys, threading
from pathlib import Path
from control.streams.clock import SharedClock
from tests.workers.test_replica_engine import settings, version
from workers.process import start_logging
from workers.replica_engine import load_engine

start_logging()
engine, _ = load_engine(version(Path(sys.argv[1])), settings(2), SharedClock())
print("ready", flush=True)
threading.Event().wait()
"""


def settings(num_ranks: int) -> ReplicaSettings:
    return ReplicaSettings(
        database_url="postgresql://nobody@127.0.0.1:1/none",
        redis_url="redis://127.0.0.1:1",
        headrace_model="tiny",
        headrace_data_dir=Path("nowhere"),
        headrace_kv_tokens=512,
        headrace_tensor_parallel=num_ranks,
        headrace_test_build=True,
    )


def version(folder: Path) -> ModelVersion:
    return ModelVersion(
        model="tiny",
        version="v1",
        weights_digest=write_manifest(folder),
        weights_folder=str(folder),
        max_model_len=MAX_POSITIONS,
        max_output_tokens=MAX_POSITIONS,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        is_in_force=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with two KV heads, and some tokenizer."""
    write_tiny_model("llama 3", tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_scripted_model(tmp_path) / name, tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_replica_ends_at_once_and_says_why_when_a_follower_is_killed(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPLICA, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as replica:
        assert replica.stdout is not None
        assert replica.stderr is not None
        assert replica.stdout.readline() == "ready\n"
        (follower,) = followers_of(replica.pid)
        os.kill(follower, signal.SIGKILL)
        assert replica.wait(AT_ONCE_S) == RANK_LOST_STATUS
        said = replica.stderr.read()
    assert f"the replica ends: Rank 1 (process {follower}) was ended by SIGKILL." in said
    assert "Traceback" not in said


def test_a_model_that_cannot_be_split_so_far_is_refused_in_words(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"cannot be split over 3 ranks: it has 2 KV heads"):
        load_engine(version(folder), settings(3), SharedClock())


def test_the_scripted_model_is_not_split(tmp_path: Path) -> None:
    scripted = version(make_scripted_model(tmp_path))
    with pytest.raises(SystemExit, match="HEADRACE_TENSOR_PARALLEL must be 1"):
        load_engine(scripted, settings(2), SharedClock())
