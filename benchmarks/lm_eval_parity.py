"""The same weights earn the same marks, whether served by Headrace or run by transformers.

lm-evaluation-harness asks both: sums by the likelihood of given answers (it needs `echo` with
logprobs), capitals by greedy words. Each question's outcome is compared, not only the accuracy.
The harness is an environment of its own (`pip install "lm_eval[api,hf]"`): it would bring a
hundred packages into ours.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.service_process import running_service

TASKS = ("headrace_sums", "headrace_capitals")
METRICS = {"headrace_sums": "acc", "headrace_capitals": "exact_match"}
NUM_AT_ONCE = 4
TASK_FOLDER = Path(__file__).parent / "lm_eval"


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one task: the accuracy by transformers and by us, and how many answers differ."""

    task: str
    num_questions: int
    theirs: float
    ours: float
    num_different: int


def measure(lm_eval: Path, folder: Path) -> list[Marks]:
    """Let the harness examine the model in this folder twice, in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        theirs = _examine(
            lm_eval, Path(scratch) / "hf", "hf", f"pretrained={folder},dtype=float32", "8"
        )
        with running_service(
            Path(scratch) / "data", str(folder), {"HEADRACE_DTYPE": "float32"}
        ) as service:
            arguments = (
                f"model={folder.name},tokenizer={folder},num_concurrent={NUM_AT_ONCE},"
                f"base_url=http://{service.host}:{service.port}/v1/completions"
            )
            ours = _examine(
                lm_eval,
                Path(scratch) / "ours",
                "local-completions",
                arguments,
                "1",
                api_key=service.api_key,
            )
    return [_marks(task, theirs[task], ours[task]) for task in TASKS]


def main(lm_eval: Path, folder: Path) -> None:
    """Print the marks; the exit status says whether they are the same."""
    marks = measure(lm_eval, folder)
    for mark in marks:
        sys.stdout.write(
            f"{mark.task:20} {mark.num_questions} questions: transformers {mark.theirs:.4f}, "
            f"Headrace {mark.ours:.4f}, {mark.num_different} answers differ\n"
        )
    if any(mark.num_different for mark in marks):
        raise SystemExit(1)


def _examine(
    lm_eval: Path,
    output: Path,
    model: str,
    arguments: str,
    batch_size: str,
    api_key: str = "",
) -> dict[str, list[dict[str, Any]]]:
    """The answers by task, in the order of the questions."""
    command = [str(lm_eval), "--model", model, "--model_args", arguments, "--tasks"]
    command += [",".join(TASKS), "--include_path", str(TASK_FOLDER), "--log_samples"]
    command += ["--output_path", str(output), "--batch_size", batch_size, "--device", "cpu"]
    environment = {
        **os.environ,  # noqa: TID251
        "OPENAI_API_KEY": api_key,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(output.parent / "cache"),
    }
    subprocess.run(command, check=True, env=environment, cwd=TASK_FOLDER.parent.parent)  # noqa: S603
    return {task: _answers(output, task) for task in TASKS}


def _answers(output: Path, task: str) -> list[dict[str, Any]]:
    (path,) = output.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: int(line["doc_id"]))


def _marks(task: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Marks:
    metric = METRICS[task]
    scores = [(float(one[metric]), float(other[metric])) for one, other in _pairs(theirs, ours)]
    return Marks(
        task,
        len(scores),
        sum(one for one, _ in scores) / len(scores),
        sum(other for _, other in scores) / len(scores),
        sum(_said(one) != _said(other) for one, other in _pairs(theirs, ours)),
    )


def _pairs(
    theirs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(theirs, ours, strict=True))


def _said(answer: dict[str, Any]) -> object:
    """What was chosen or said: the likeliest choice's number, or the words."""
    said = answer["filtered_resps"]
    if not isinstance(said[0], list):
        return said
    likelihoods = [float(one[0]) for one in said]
    return likelihoods.index(max(likelihoods))
