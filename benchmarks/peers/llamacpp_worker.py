"""llama.cpp as an offline worker: python -m benchmarks.peers.llamacpp_worker PROGRAM GGUF.

Its own llama-batched-bench measures: random tokens, no sampling, no text, no scheduling. That is
more than its server reaches, so the comparison errs in its favour.
"""

import json
import subprocess
import sys
from collections.abc import Callable

from benchmarks.offline_work import OfflineWork
from benchmarks.offline_worker import Answer, answer_lines, read_work

NUM_THREADS = "2"


def main(program: str, model: str) -> None:
    """Answer until stdin ends."""

    def begin() -> Callable[[dict[str, object]], Answer]:
        def answer(asked: dict[str, object]) -> Answer:
            if "say_after" in asked:
                raise ValueError("llama-batched-bench says nothing")
            return {"tokens_per_s": tokens_per_second(program, model, read_work(asked))}

        return answer

    answer_lines(begin)


def tokens_per_second(program: str, model: str, work: OfflineWork) -> float:
    """The work's rate, as the program measures it. Raises RuntimeError with its last words."""
    context = work.batch * (work.prompt + work.output) + 256
    command = [program, "-m", model, "-c", str(context), "-b", "2048", "-ub", "512"]
    command += ["-t", NUM_THREADS, "-tb", NUM_THREADS, "-fa", "auto", "--output-format", "jsonl"]
    command += ["-npp", str(work.prompt), "-ntg", str(work.output), "-npl", str(work.batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(done.stderr[-800:])
    row: dict[str, float] = rows[-1]
    if work.output == 1:
        return work.batch * work.prompt / (row["t_pp"] + row["t_tg"])
    return row["speed_tg"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
