"""What the service takes of the engine's own speed: HTTP, Redis, the ledger, and each step's words.

The same engine, with the same sizes and the same work, is asked in turn in this process, from
`try_submit` to the last update, and over HTTP through a whole `headrace serve`. While the one is
asked the other sleeps. Then a step's own costs beside the model are measured (`step_share.py`).
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import serving, step_share
from benchmarks.assigned_requests import stream_request
from benchmarks.completion_client import Endpoint
from benchmarks.engine_speed import SETTINGS as STEP_SETTINGS
from benchmarks.offline_work import random_prompts
from benchmarks.result_file import write_results
from benchmarks.service_process import ServiceProcess, running_service
from benchmarks.step_share import StepLoad, StepShare
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.from_folder import engine_from_folder
from engine.interface.sequence_update import SequenceEnd
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer
from workers.settings import ReplicaSettings

MAX_COST = 0.10
NUM_ROUNDS = 3
PATIENCE_S = 120.0
_SIZES = (
    "kv_tokens",
    "host_kv_tokens",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunk_size",
    "inter_token_target_ms",
)
WORK = serving.SERVED


@dataclass(frozen=True, slots=True)
class PlatformCost:
    """Output tokens per second in both ways, round by round."""

    work: serving.ServedWork
    in_process: list[float]
    over_http: list[float]

    @property
    def cost(self) -> float:
        """The share of the engine's throughput that the platform takes."""
        return 1 - statistics.median(self.over_http) / statistics.median(self.in_process)

    @property
    def is_met(self) -> bool:
        """Whether the cost is within its bar."""
        return self.cost <= MAX_COST

    def table(self) -> str:
        """The measurement in words."""
        lines = [f"{self.work.describe()}; output tokens/s, medians of {len(self.over_http)}"]
        for name, runs in (("engine in process", self.in_process), ("over HTTP", self.over_http)):
            each = ", ".join(f"{run:.0f}" for run in runs)
            lines.append(f"  {name:<18} {statistics.median(runs):8.1f}   ({each})")
        lines.append(f"  the platform takes {self.cost:8.1%}   (bar {MAX_COST:.0%})")
        return "\n".join(lines)


def replica_defaults() -> tuple[EngineSettings, dict[str, str]]:
    """An engine's sizes as a replica has them unless told otherwise, and the words that tell."""
    value = {name: ReplicaSettings.model_fields[f"headrace_{name}"].default for name in _SIZES}
    settings = EngineSettings(
        block_size=value["block_size"],
        num_blocks=value["kv_tokens"] // value["block_size"],
        num_host_blocks=value["host_kv_tokens"] // value["block_size"],
        max_num_batched_tokens=value["max_num_batched_tokens"],
        chunk_size=value["chunk_size"],
        max_num_seqs=value["max_num_seqs"],
        inter_token_target_s=value["inter_token_target_ms"] / 1000,
    )
    return settings, {f"HEADRACE_{name.upper()}": str(value[name]) for name in _SIZES}


def measure(
    folder: Path, work: serving.ServedWork = WORK, num_rounds: int = NUM_ROUNDS
) -> PlatformCost:
    """Start the service and an engine, ask both in turn, stop both."""
    settings, words = replica_defaults()
    rng = random.Random(time.time_ns())
    in_process, over_http = [], []
    loop = EngineLoop(engine_from_folder(folder, settings, execution=ThreadedExecution))
    loop.start()
    try:
        with (
            tempfile.TemporaryDirectory() as data_dir,
            running_service(Path(data_dir), str(folder), words) as service,
        ):
            endpoint = _endpoint(service, folder)
            serving.warm_up(endpoint, rng)
            run_in_process(loop, replace(work, num_requests=2, output=4), rng)
            for _ in range(num_rounds):
                in_process.append(run_in_process(loop, work, rng))
                over_http.append(serving.run(endpoint, work, rng).tokens_per_s)
    finally:
        loop.stop(PATIENCE_S)
    return PlatformCost(work, in_process, over_http)


def run_in_process(loop: EngineLoop, work: serving.ServedWork, rng: random.Random) -> float:
    """Output tokens per second of a closed loop of streams on the engine's own queues."""
    prompts = random_prompts(work.num_requests, work.prompt, rng, work.shared)
    requests = iter(
        [stream_request(f"{rng.getrandbits(64):026d}", p, work.output) for p in prompts]
    )
    num_tokens = num_ended = 0
    started = time.perf_counter()
    for _ in range(min(work.concurrency, work.num_requests)):
        loop.try_submit(next(requests))
    while num_ended < work.num_requests:
        updates = loop.updates.get(PATIENCE_S)
        if updates is None:
            raise RuntimeError("The engine died.") from loop.failure
        for update in updates:
            num_tokens += len(update.token_ids)
            if update.end is None:
                continue
            if update.end is not SequenceEnd.LENGTH:
                raise RuntimeError(f"A stream ended: {update.end} {update.message}")
            num_ended += 1
            following = next(requests, None)
            if following is not None:
                loop.try_submit(following)
    return num_tokens / (time.perf_counter() - started)


def measure_step(folder: Path, load: StepLoad, dtype: str = "bfloat16") -> StepShare:
    """The share of a step that is not the model, on the demo model or any other."""
    engine: Engine = engine_from_folder(
        folder, STEP_SETTINGS, dtype=dtype, execution=ThreadedExecution
    )
    return step_share.measure(engine, Tokenizer.from_folder(folder), load)


def main(folder: Path, file: Path | None) -> None:
    """Print both measurements; the exit status says whether the bars were met."""
    cost = measure(folder)
    share = measure_step(folder, StepLoad())
    sys.stdout.write(f"{cost.table()}\n{share.table()}\n")
    write_results(file, "platform-cost", figures(cost, share))
    if not (cost.is_met and share.is_met):
        raise SystemExit(1)


def figures(cost: PlatformCost, share: StepShare) -> dict[str, float | Sequence[float]]:
    """What is written to a file."""
    return {
        "in_process_tokens_per_s": cost.in_process,
        "over_http_tokens_per_s": cost.over_http,
        "platform_cost": cost.cost,
        "step_ms": share.step_ms,
        "engine_ms": share.engine_ms,
        "publisher_ms": share.publisher_ms,
        "step_share": share.share,
    }


def _endpoint(service: ServiceProcess, folder: Path) -> Endpoint:
    return Endpoint(f"http://{service.host}:{service.port}", folder.name, service.api_key)
