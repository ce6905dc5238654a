"""This engine beside others on the same machine, in one run, turn by turn.

All engines of a precision are loaded first; then each work is run by one after another, round
after round, in the opposite order every other round, while the others are stopped by a signal.
So whatever the machine does besides falls on all of them alike. This service as a server is not
stopped between its turns: that would look to it like a failure. Idle, it takes about a
hundredth of a core, at the others' expense and ours.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import process_tree, serving
from benchmarks.comparison import Comparison
from benchmarks.completion_client import CompletionFailed, Endpoint
from benchmarks.contestants import Contestant, contestants
from benchmarks.offline_process import OfflineProcess, WorkerFailed, running_worker
from benchmarks.offline_work import OFFLINE_WORKS, OfflineWork
from benchmarks.result_file import write_results
from benchmarks.service_process import free_port, running_server, running_service
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

# Every sane engine goes on alike, whatever it rounds.
QUESTION = "January, February, March, April,"
ANSWER_TOKENS = 8
PARTS = ("offline", "served")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and how often each work is run."""

    num_rounds: int = 3
    parts: Sequence[str] = PARTS
    offline: Sequence[OfflineWork] = OFFLINE_WORKS
    served: Sequence[serving.ServedWork] = (serving.SERVED, serving.PREFIX)

    @property
    def rows(self) -> list[str]:
        """The works of the parts that are wanted."""
        rows = {
            "offline": [work.name for work in self.offline],
            "served": [work.name for work in self.served],
        }
        return [row for part in self.parts for row in rows[part]]

    @classmethod
    def tiny(cls, parts: Sequence[str]) -> "Plan":
        """To see that everything runs; its figures mean nothing."""
        return cls(
            num_rounds=1,
            parts=parts,
            offline=(OfflineWork(1, 32, 8), OfflineWork(8, 32, 8), OfflineWork(2, 64, 1)),
            served=(
                serving.ServedWork("served", 4, 2, prompt=32, output=8),
                serving.ServedWork("prefix", 4, 4, prompt=64, output=4, shared=32),
            ),
        )


def compare(folder: Path, peers: Path | None, precision: str, plan: Plan) -> Comparison:
    """Run the plan in one precision."""
    with tempfile.TemporaryDirectory() as package:
        taking_part = contestants(folder, peers, precision, Path(package))
        comparison = Comparison(precision, [one.name for one in taking_part], plan.rows)
        if "offline" in plan.parts:
            _compare_offline(comparison, taking_part, folder, plan)
        if "served" in plan.parts:
            _compare_served(comparison, taking_part, folder, plan)
    return comparison


def main(
    folder: Path, peers: Path | None, precisions: Sequence[str], plan: Plan, file: Path | None
) -> None:
    """Print a table for each precision; the exit status says whether every bar was met."""
    comparisons = []
    for precision in precisions:
        comparisons.append(compare(folder, peers, precision, plan))
        sys.stdout.write(comparisons[-1].table() + "\n")
        sys.stdout.flush()
    write_results(file, "compare", [asdict(comparison) for comparison in comparisons])
    if any(comparison.missed() for comparison in comparisons):
        raise SystemExit(1)


def _compare_offline(
    comparison: Comparison, taking_part: list[Contestant], folder: Path, plan: Plan
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    question = list(tokenizer.encode_plain(QUESTION))
    with ExitStack() as stack:
        workers: list[tuple[str, OfflineProcess]] = []
        loaded: list[tuple[str, OfflineProcess]] = []
        for one in taking_part:
            with _noted(comparison, f"{one.name} offline"):
                worker = stack.enter_context(running_worker(one.worker))
                workers.append((one.name, worker))
                if one.stays_loaded:
                    loaded.append((one.name, worker))
                    comparison.add("ready", one.name, worker.ready_s)
        for name, worker in loaded:
            with _noted(comparison, f"{name}, asked {QUESTION!r}"):
                said = worker.say_after(question, ANSWER_TOKENS)
                text = Detokenizer(tokenizer, at_start=False).push(said)
                comparison.notes.append(f"{name} goes on with {text!r}")
        for turn in _turns(plan.num_rounds, len(workers)):
            for work in plan.offline:
                for name, worker in (workers[i] for i in turn):
                    with _noted(comparison, f"{name} at {work.name}"):
                        rate = worker.tokens_per_second(work)
                        comparison.add(work.name, name, rate)
                        _say(f"{comparison.precision} {work.name}: {name} {rate:.1f}")
        for name, worker in loaded:
            comparison.add("peak memory", name, worker.peak_memory_mb())


def _compare_served(
    comparison: Comparison, taking_part: list[Contestant], folder: Path, plan: Plan
) -> None:
    rng = random.Random(time.time_ns())
    with ExitStack() as stack:
        servers: list[tuple[str, Endpoint, int | None]] = []
        for one in taking_part:
            with _noted(comparison, f"{one.name} as a server"):
                endpoint, process_id = stack.enter_context(_server(one, folder))
                servers.append((one.name, endpoint, process_id))
        for turn in _turns(plan.num_rounds, len(servers)):
            for work in plan.served:
                for name, endpoint, process_id in (servers[i] for i in turn):
                    with _noted(comparison, f"{name} at {work.name}"):
                        figures = _run_served(endpoint, process_id, work, rng)
                        _add_served(comparison, name, work, figures)


def _run_served(
    endpoint: Endpoint, process_id: int | None, work: serving.ServedWork, rng: random.Random
) -> dict[str, float]:
    with ExitStack() as stack:
        if process_id is not None:
            stack.enter_context(process_tree.turn(process_id))
        serving.warm_up(endpoint, rng)
        return serving.run(endpoint, work, rng).summary()


def _add_served(
    comparison: Comparison, name: str, work: serving.ServedWork, figures: dict[str, float]
) -> None:
    if figures["failed"]:
        comparison.notes.append(f"{name} failed {figures['failed']:.0f} of {work.name}")
    if work.name == "prefix":
        comparison.add("prefix", name, figures["wall_s"])
    else:
        comparison.add("served", name, figures["tokens_per_s"])
        comparison.add("served TTFT p95", name, figures["ttft_ms_p95"])
        comparison.add("served ITL p95", name, figures["itl_ms_p95"])
    _say(f"{comparison.precision} {work.name}: {name} {figures['tokens_per_s']:.1f}")


@contextmanager
def _server(contestant: Contestant, folder: Path) -> Iterator[tuple[Endpoint, int | None]]:
    """A running server, paused if it is not ours, and the process to wake for its turns."""
    if contestant.server is None:
        settings = {"HEADRACE_DTYPE": contestant.dtype}
        with (
            tempfile.TemporaryDirectory() as data_dir,
            running_service(Path(data_dir), str(folder), settings) as service,
        ):
            url = f"http://{service.host}:{service.port}"
            yield Endpoint(url, folder.name, service.api_key), None
        return
    port = free_port()
    command, url = contestant.server(port), f"http://127.0.0.1:{port}"
    with running_server(command.argv, command.environment, f"{url}/health") as process_id:
        process_tree.pause(process_id)
        try:
            yield Endpoint(url, "model"), process_id
        finally:
            process_tree.resume(process_id)


def _turns(num_rounds: int, num_taking_part: int) -> Iterator[list[int]]:
    """Who comes when, in each round."""
    order = list(range(num_taking_part))
    for number in range(num_rounds):
        yield order if number % 2 == 0 else order[::-1]


@contextmanager
def _noted(comparison: Comparison, what: str) -> Iterator[None]:
    """Whoever fails is written down, and the others go on."""
    try:
        yield
    except (WorkerFailed, CompletionFailed, RuntimeError, OSError) as error:
        comparison.notes.append(f"{what}: {error}")
        _say(f"{what}: {error}")


def _say(progress: str) -> None:
    sys.stderr.write(progress + "\n")
