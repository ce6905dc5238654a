"""A comparison knows its bars, says who failed, and runs whoever is there."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.compare import Plan, compare
from benchmarks.comparison import BARS, Comparison
from benchmarks.contestants import Contestant, contestants
from benchmarks.offline_process import Command
from benchmarks.offline_work import OfflineWork
from benchmarks.peers.make_w8a8 import make_w8a8
from benchmarks.plots import NothingToDraw, charts_of
from benchmarks.result_file import write_results

ROWS = list(BARS["bf16"])


# An engine that says one word, and more of it in the same time if its name is "fast".
WORKER = """
import sys, time
from benchmarks.offline_worker import serve_works

pace = {"fast": 0.001, "slow": 0.01}[sys.argv[1]]

def generate(prompts, output):
    time.sleep(pace * output)
    return [[504] * output for _ in prompts]

serve_works(lambda: generate)
"""


def comparison_at(factor: float) -> Comparison:
    """Ours at so many times its bars, over three rounds."""
    comparison = Comparison("bf16", ["ours", "OpenVINO", "vLLM"], list(ROWS))
    for row in ROWS:
        for noise in (0.5, 1.0, 9.0):
            comparison.add(row, "OpenVINO", 100.0 * noise)
            comparison.add(row, "ours", 100.0 * BARS["bf16"][row] * factor * noise)
    return comparison


def test_every_bar_is_met_or_missed_by_its_median() -> None:
    assert comparison_at(1.001).missed() == []
    assert comparison_at(0.999).missed() == ROWS


def test_a_row_that_nobody_ran_is_missed() -> None:
    comparison = comparison_at(2.0)
    del comparison.runs["decode b8"]["ours"]
    assert comparison.missed() == ["decode b8"]
    comparison.rows.remove("decode b8")
    assert comparison.missed() == []


def test_the_table_shows_ratios_bars_and_gaps() -> None:
    comparison = comparison_at(1.0)
    comparison.notes.append("vLLM offline: it did not start")
    table = comparison.table()
    assert "1.41" in table
    assert "ours/vLLM" in table
    assert "it did not start" in table


def test_only_those_take_part_who_are_there(tmp_path: Path) -> None:
    peers, package = tmp_path / "peers", tmp_path / "package"
    package.mkdir()
    python = peers / "openvino-venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (peers / "openvino-int8").mkdir()
    alone = contestants(Path("model"), peers, "bf16", package)
    assert [one.name for one in alone] == ["ours"]
    ours, other = contestants(Path("model"), peers, "int8", package)
    assert ours.server is None
    assert ours.dtype == "int8"
    assert other.server is not None
    assert "4321" in other.server(4321).argv
    assert other.worker.environment["PYTHONPATH"] == str(package)
    assert [path.name for path in package.iterdir()] == ["benchmarks"]


def test_results_tell_the_machine_and_can_be_drawn(tmp_path: Path) -> None:
    from dataclasses import asdict

    file = tmp_path / "results.json"
    write_results(None, "compare", [])
    write_results(file, "compare", [asdict(comparison_at(1.0))])
    assert json.loads(file.read_text())["machine"]["num_cores"] >= 1
    (chart,) = charts_of(file)
    assert chart.rows == ROWS
    assert chart.ratios("ours") == pytest.approx([BARS["bf16"][row] for row in ROWS])
    assert chart.ratios("vLLM") == [0.0] * len(ROWS)
    write_results(file, "serving", [])
    with pytest.raises(NothingToDraw):
        charts_of(file)


def test_int8_weights_of_a_peer_are_near_those_they_come_from(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    folder.mkdir()
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = torch.ones(8, dtype=torch.bfloat16)
    save_file({"a.q_proj.weight": weight, "a.norm.weight": norm}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    make_w8a8(folder, tmp_path / "int8")
    found = load_file(tmp_path / "int8/model.safetensors")
    assert found["a.q_proj.weight"].dtype is torch.int8
    again = found["a.q_proj.weight"].float() * found["a.q_proj.weight_scale"].float()
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    # Half a step of rounding, and what bfloat16 loses of the scale.
    assert bool(((again - weight.float()).abs() <= largest * (0.5 / 127 + 2**-8)).all())
    assert torch.equal(found["a.norm.weight"], norm)
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_engines_take_turns_and_whoever_fails_is_named(
    demo_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def contestant(name: str, argument: str) -> Contestant:
        return Contestant(name, "bf16", Command([sys.executable, str(script), argument]))

    taking_part = [contestant("ours", "fast"), contestant("OpenVINO", "slow")]
    taking_part.append(contestant("vLLM", "broken"))
    monkeypatch.setattr("benchmarks.compare.contestants", lambda *_: taking_part)
    plan = Plan(num_rounds=2, parts=("offline",), offline=(OfflineWork(1, 8, 5),))
    result = compare(demo_model_folder, None, "bf16", plan)
    assert {name: len(runs) for name, runs in result.runs["decode b1"].items()} == {
        "ours": 2,
        "OpenVINO": 2,
    }
    ratio = result.ratio("decode b1", "OpenVINO")
    assert ratio is not None
    assert ratio > 2.0
    assert result.missed() == []
    (failure,) = (note for note in result.notes if note.startswith("vLLM"))
    assert "KeyError: 'broken'" in failure
    assert sum("goes on with" in note for note in result.notes) == 2
