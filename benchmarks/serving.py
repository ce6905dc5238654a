"""A server under load, over HTTP: what readers get, whichever server it is.

    closed loop   so many readers; each asks again when its answer is complete
    open loop     requests arrive by chance at a mean rate, whether or not the server keeps up

Works against any OpenAI base URL that streams /v1/completions. Prompts are random token ids,
new in every run, so only the beginning that is meant to be shared is ever found in a cache.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.completion_client import CompletionFailed, CompletionTimes, Endpoint, complete
from benchmarks.offline_work import random_prompts
from benchmarks.result_file import write_results


@dataclass(frozen=True, slots=True)
class ServedWork:
    """What is asked of a server. With `rate` (requests per second) the loop is open."""

    name: str
    num_requests: int
    concurrency: int
    prompt: int
    output: int
    shared: int = 0
    rate: float | None = None

    def describe(self) -> str:
        """The work in words."""
        how = f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} per second"
        shared = f", {self.shared} of them common" if self.shared else ""
        return (
            f"{self.name}: {self.num_requests} requests, {how}, {self.prompt} prompt tokens"
            f"{shared}, {self.output} out"
        )


SERVED = ServedWork("served", num_requests=64, concurrency=16, prompt=128, output=64)
PREFIX = ServedWork("prefix", num_requests=32, concurrency=32, prompt=800, output=16, shared=768)
WORKS = {work.name: work for work in (SERVED, PREFIX)}


@dataclass(frozen=True, slots=True)
class Serving:
    """One run: throughput by the wall, and what the readers waited, in milliseconds."""

    work: ServedWork
    wall_s: float
    num_tokens: int
    num_cached_tokens: int
    num_failed: int
    first_token_ms: list[float]
    gaps_ms: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole run."""
        return self.num_tokens / self.wall_s

    def summary(self) -> dict[str, float]:
        """The figures that are compared."""
        ttft, itl = sorted(self.first_token_ms), sorted(self.gaps_ms)
        return {
            "tokens_per_s": self.tokens_per_s,
            "wall_s": self.wall_s,
            "ttft_ms_p50": percentile(ttft, 0.50),
            "ttft_ms_p95": percentile(ttft, 0.95),
            "itl_ms_p50": percentile(itl, 0.50),
            "itl_ms_p95": percentile(itl, 0.95),
            "cached_tokens": float(self.num_cached_tokens),
            "failed": float(self.num_failed),
        }


@dataclass(frozen=True, slots=True)
class Served:
    """Several runs of one work against one server."""

    work: ServedWork
    runs: list[dict[str, float]]

    def medians(self) -> dict[str, float]:
        """Each figure's median over the runs."""
        return {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}

    def table(self) -> str:
        """The measurement in words."""
        m = self.medians()
        runs = ", ".join(f"{run['tokens_per_s']:.0f}" for run in self.runs)
        return "\n".join(
            [
                f"{self.work.describe()}; medians of {len(self.runs)}",
                f"  output tokens/s  {m['tokens_per_s']:9.1f}   ({runs})",
                f"  all answered in  {m['wall_s']:9.2f} s",
                f"  TTFT, ms         p50 {m['ttft_ms_p50']:8.1f}   p95 {m['ttft_ms_p95']:8.1f}",
                f"  ITL, ms          p50 {m['itl_ms_p50']:8.1f}   p95 {m['itl_ms_p95']:8.1f}",
                f"  cached tokens    {m['cached_tokens']:9.0f}   failed {m['failed']:.0f}",
            ]
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the neighbours of a sorted list; NaN for an empty one."""
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def run(endpoint: Endpoint, work: ServedWork, rng: random.Random) -> Serving:
    """Ask for the work once. Raises CompletionFailed if nothing at all was answered."""
    prompts = random_prompts(work.num_requests, work.prompt, rng, work.shared)
    started = time.perf_counter()
    answers = asyncio.run(_ask(endpoint, work, prompts, rng))
    wall_s = time.perf_counter() - started
    done = [answer for answer in answers if isinstance(answer, CompletionTimes)]
    if not done:
        raise next(answer for answer in answers if isinstance(answer, CompletionFailed))
    return Serving(
        work,
        wall_s,
        num_tokens=sum(times.num_tokens for times in done),
        num_cached_tokens=sum(times.num_cached_tokens for times in done),
        num_failed=len(answers) - len(done),
        first_token_ms=[1000 * times.first_token_s for times in done],
        gaps_ms=[1000 * gap for times in done for gap in times.gaps_s],
    )


def warm_up(endpoint: Endpoint, rng: random.Random) -> None:
    """Two short requests, so that what is done once is not measured."""
    run(endpoint, ServedWork("warm-up", 2, 2, prompt=32, output=4), rng)


def measure(endpoint: Endpoint, work: ServedWork, num_runs: int, seed: int = 1) -> Served:
    """The work several times, after a warm-up."""
    rng = random.Random(seed)
    warm_up(endpoint, rng)
    return Served(work, [run(endpoint, work, rng).summary() for _ in range(num_runs)])


def main(endpoint: Endpoint, works: Sequence[ServedWork], num_runs: int, file: Path | None) -> None:
    """Print the works' measurements and write them to `file`; exit status 1 if one failed.

    Prompts are new in every call, so that a server that has run since the last finds nothing.
    """
    seed = time.time_ns()
    results = [measure(endpoint, work, num_runs, seed + n) for n, work in enumerate(works)]
    for served in results:
        sys.stdout.write(served.table() + "\n")
    write_results(file, "serving", [asdict(served) for served in results])
    if any(run["failed"] for served in results for run in served.runs):
        raise SystemExit(1)


def at_rate(work: ServedWork, rate: float | None) -> ServedWork:
    """The same work in an open loop."""
    return work if rate is None else replace(work, rate=rate)


async def _ask(
    endpoint: Endpoint, work: ServedWork, prompts: list[list[int]], rng: random.Random
) -> list[CompletionTimes | CompletionFailed]:
    if work.rate is not None:
        return await _open_loop(endpoint, work, prompts, rng)
    waiting = iter(prompts)
    answers: list[CompletionTimes | CompletionFailed] = []

    async def reader() -> None:
        for prompt in waiting:
            answers.append(await _answer(endpoint, prompt, work.output))

    await asyncio.gather(*(reader() for _ in range(work.concurrency)))
    return answers


async def _open_loop(
    endpoint: Endpoint, work: ServedWork, prompts: list[list[int]], rng: random.Random
) -> list[CompletionTimes | CompletionFailed]:
    assert work.rate is not None
    asked = []
    due = asyncio.get_running_loop().time()
    for prompt in prompts:
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        asked.append(asyncio.create_task(_answer(endpoint, prompt, work.output)))
        due += rng.expovariate(work.rate)
    return list(await asyncio.gather(*asked))


async def _answer(
    endpoint: Endpoint, prompt: list[int], output: int
) -> CompletionTimes | CompletionFailed:
    """A failure is counted, and the run goes on."""
    try:
        return await complete(endpoint, prompt, output)
    except CompletionFailed as error:
        return error
