"""The offline works count what they say, and a worker does them in a process of its own."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.offline_process import Command, WorkerFailed, running_worker
from benchmarks.offline_work import OfflineWork, Prompts, random_prompts, tokens_per_second

WORKER = """
import time
from benchmarks.offline_worker import serve_works

def load():
    print("noise of a library")
    def generate(prompts, output):
        if output == 13:
            raise ValueError("thirteen")
        time.sleep(0.001)
        return [[prompt[0]] * output for prompt in prompts]
    return generate

serve_works(load)
"""


def test_a_decode_rate_leaves_the_prefill_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("benchmarks.offline_work.time.perf_counter", lambda: now)

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        nonlocal now
        now += 10.0 + 0.5 * (output - 1)  # Ten seconds of prefill, two steps a second.
        return [[0] * output for _ in prompts]

    rng = random.Random(1)
    assert tokens_per_second(generate, OfflineWork(8, 128, 128), rng) == pytest.approx(16.0)
    assert tokens_per_second(generate, OfflineWork(5, 100, 1), rng) == pytest.approx(50.0)


def test_an_engine_that_says_too_little_is_not_measured() -> None:
    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        return [[0] * (output - 1) for _ in prompts]

    with pytest.raises(RuntimeError, match="decode b2"):
        tokens_per_second(generate, OfflineWork(2, 8, 4), random.Random(1))


def test_prompts_share_their_beginning_and_nothing_else() -> None:
    one, other = random_prompts(2, 40, random.Random(1), shared=30)
    assert one[:30] == other[:30]
    assert one[30:] != other[30:]
    assert len(one) == len(other) == 40


def test_a_worker_answers_beside_the_noise_of_its_libraries(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with running_worker(Command([sys.executable, str(script)])) as worker:
        assert worker.ready_s > 0.0
        assert worker.say_after([7, 8], 3) == [7, 7, 7]
        assert worker.tokens_per_second(OfflineWork(4, 8, 2)) > 0.0
        assert worker.peak_memory_mb() > 1.0
        with pytest.raises(WorkerFailed, match="thirteen"):
            worker.tokens_per_second(OfflineWork(1, 8, 13))
        assert worker.say_after([9], 1) == [9], "it goes on after a failure"


def test_a_worker_that_cannot_load_says_why() -> None:
    command = Command([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(WorkerFailed, match="no such model"), running_worker(command):
        pass


def test_a_work_reaches_a_worker_as_it_was() -> None:
    from dataclasses import asdict

    from benchmarks.offline_worker import read_work

    work = OfflineWork(8, 64, 2)
    assert read_work(json.loads(json.dumps(asdict(work)))) == work
