"""How fast the engine is on its own: decode at several batch sizes, and prefill.

No service, no text, no pace to keep: prompts go in, and steps follow each other, decided and
computed in turn on this thread as `execution` says. The works and what their rates mean are in
`offline_work.py`, which the engines that we are compared with run as well.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.offline_work import (
    OFFLINE_WORKS,
    Generate,
    OfflineWork,
    Prompts,
    tokens_per_second,
    warm_up,
)
from benchmarks.result_file import write_results
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.from_folder import engine_from_folder
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd

NUM_RUNS = 3

# 51,200 tokens of KV, and the steps that the engines beside us take.
SETTINGS = EngineSettings(
    num_blocks=3_200,
    max_num_batched_tokens=2_048,
    chunk_size=1_024,
    max_num_seqs=64,
    high_watermark=1.0,
    low_watermark=1.0,
    # The pace is not what is measured here.
    inter_token_target_s=3_600.0,
)


@dataclass(frozen=True, slots=True)
class WorkSpeed:
    """Tokens per second of one work, run by run."""

    name: str
    tokens_per_s: list[float]

    @property
    def median(self) -> float:
        """What is reported."""
        return statistics.median(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """All works on one model in one dtype."""

    dtype: str
    load_s: float
    works: list[WorkSpeed]

    def table(self) -> str:
        """The measurement in words."""
        runs = len(self.works[0].tokens_per_s)
        lines = [
            f"engine alone, {self.dtype}, loaded in {self.load_s:.1f} s; "
            f"tokens/s, medians of {runs}"
        ]
        for work in self.works:
            low, high = min(work.tokens_per_s), max(work.tokens_per_s)
            lines.append(f"  {work.name:<16} {work.median:9.1f}   ({low:.1f} to {high:.1f})")
        return "\n".join(lines)


def generate_with(engine: Engine) -> Generate:
    """The engine as the works use it; deciding overlaps computing, as in a replica."""
    numbers = itertools.count()

    def generate(prompts: Prompts, output: int) -> Sequence[Sequence[int]]:
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            request_id = str(next(numbers))
            said[request_id] = []
            engine.add(_request(request_id, prompt, output))
        while engine.has_work:
            for update in engine.step_overlapped():
                if update.end not in (None, SequenceEnd.LENGTH):
                    raise RuntimeError(f"A sequence ended: {update.end} {update.message}")
                said[update.request_id] += update.token_ids
        return list(said.values())

    return generate


def measure(
    folder: Path,
    dtype: str = "bfloat16",
    works: Sequence[OfflineWork] = OFFLINE_WORKS,
    num_runs: int = NUM_RUNS,
    settings: EngineSettings = SETTINGS,
) -> EngineSpeed:
    """Load the model, then run all works `num_runs` times, one round after another."""
    started = time.perf_counter()
    engine = engine_from_folder(folder, settings, dtype=dtype, execution=ThreadedExecution)
    load_s = time.perf_counter() - started
    generate, rng = generate_with(engine), random.Random(1)
    try:
        warm_up(generate, rng)
        rounds = [
            [tokens_per_second(generate, work, rng) for work in works] for _ in range(num_runs)
        ]
    finally:
        engine.close()
    by_work = zip(works, zip(*rounds, strict=True), strict=True)
    return EngineSpeed(dtype, load_s, [WorkSpeed(work.name, list(runs)) for work, runs in by_work])


def main(folder: Path, dtype: str, file: Path | None) -> None:
    """Print the measurement on a model folder, and write it to `file`."""
    speed = measure(folder, dtype)
    sys.stdout.write(speed.table() + "\n")
    write_results(file, "engine-speed", asdict(speed))


def _request(request_id: str, prompt: Sequence[int], output: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompts=(tuple(prompt),),
        sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )
