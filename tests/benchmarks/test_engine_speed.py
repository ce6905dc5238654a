"""The engine's own benchmarks measure what they say, on small works of a tiny model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_speed import SETTINGS, measure
from benchmarks.offline_work import OfflineWork
from benchmarks.perplexity import MAX_RISE, Perplexity, Reading, read, reading_of
from engine.interface.token_logprobs import TokenLogprob
from tests.engine.oracle import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


def test_each_work_is_run_in_every_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.offline_work.FIRST_TOKEN", 3)
    monkeypatch.setattr("benchmarks.offline_work.LAST_TOKEN", 250)
    works = (OfflineWork(2, 16, 3), OfflineWork(2, 16, 1))
    settings = replace(SETTINGS, num_blocks=16)
    speed = measure(folder, works=works, num_runs=2, settings=settings)
    assert [work.name for work in speed.works] == ["decode b2", "prefill 2x16"]
    assert all(len(work.tokens_per_s) == 2 and work.median > 0.0 for work in speed.works)
    assert "decode b2" in speed.table()


def test_a_text_is_read_as_transformers_reads_it(folder: Path) -> None:
    windows = [tuple(range(3, 43)), tuple(range(60, 50, -1))]
    reading = read(folder, "float32", windows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, likeliest = [], []
    for window in windows:
        with torch.inference_mode():
            scores = model(torch.tensor([window])).logits[0, :-1].log_softmax(dim=-1)
        expected += [float(row[token]) for row, token in zip(scores, window[1:], strict=True)]
        likeliest += scores.argmax(dim=-1).tolist()
    assert reading.logprobs == pytest.approx(expected, abs=1e-3)
    assert reading.choices == likeliest
    assert reading.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-3)


@pytest.mark.parametrize(("rise", "is_met"), [(0.0, True), (0.009, True), (0.011, False)])
def test_a_rise_over_the_bar_is_missed(rise: float, is_met: bool) -> None:
    reference = Reading("bfloat16", [-1.0, -3.0], [1, 2])
    loss = -math.log1p(rise)
    other = Reading("int8", [-1.0 + loss, -3.0 + loss], [1, 7])
    result = Perplexity(reference, other)
    assert result.rise == pytest.approx(rise)
    assert result.is_met is is_met
    assert result.agreement == 0.5
    assert "50.00% of all places" in result.table()
    assert result.figures()["dtype"] == "int8"
    assert reference.perplexity == pytest.approx(math.e**2)
    assert MAX_RISE == 0.01


def test_a_reading_takes_the_likeliest_token_of_each_place() -> None:
    entry = TokenLogprob(-2.0, (5, 6), (-0.5, -1.0))
    reading = reading_of("int8", [(1, 2), (3, 4)], [[entry], [entry._replace(top_ids=(8, 5))]])
    assert reading.logprobs == [-2.0, -2.0]
    assert reading.choices == [5, 8]
