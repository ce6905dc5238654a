"""Whether a request's stages, as its one record tells them, are the time that its reader waited.

Readers come at random to a whole service over HTTP, enough of them that some must queue, and note
when they sent their request and when the first text came. Then each one's `request_stages` is read
from the database and set against that. What no process of the service can see is left: the
beginning of a connection, and what lies between two processes' sockets.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import uvloop
from sqlalchemy import text

from benchmarks.completion_client import CompletionTimes, Endpoint, complete
from benchmarks.result_file import write_results
from benchmarks.service_process import running_service
from benchmarks.serving import percentile
from cli.env_file import read_env_file
from cli.settings import DATABASE_URL, SERVERS_FILE
from control.database.connection import connect
from control.identity.request_id import created_at_of

BAR_MS = 2.0
BAR_SHARE = 0.99
NUM_WARM_UP = 40
NUM_REQUESTS = 600
RATE = 12.0
# The gateways write down what they told once a second.
WRITTEN_S = 3.0
STAGES = ("accept", "queue", "place", "wait", "prefill", "publish", "tell")
_SETTINGS = {
    "HEADRACE_SCRIPTED_DELAY_MS": "4",
    "HEADRACE_MAX_NUM_SEQS": "6",
    "HEADRACE_CHUNK_SIZE": "32",
}
_PREFIX = "cmpl-"


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds, request by request: what the reader saw, and the stages."""

    seen_ms: Sequence[float]
    stages_ms: Sequence[Sequence[float]]

    @property
    def left_ms(self) -> list[float]:
        """What the reader saw beyond the sum of the stages, in order."""
        return sorted(
            seen - sum(stages) for seen, stages in zip(self.seen_ms, self.stages_ms, strict=True)
        )

    @property
    def share(self) -> float:
        """How many of the sums are within the bar."""
        return statistics.fmean(abs(left) <= BAR_MS for left in self.left_ms)

    @property
    def is_met(self) -> bool:
        """Whether enough are."""
        return self.share >= BAR_SHARE

    def figures(self) -> dict[str, float]:
        """What is written to a file."""
        return {
            "left_ms_p50": percentile(self.left_ms, 0.5),
            "left_ms_p99": percentile(self.left_ms, 0.99),
            "share_within": self.share,
        }

    def table(self) -> str:
        """The measurement in words."""
        rows = [("seen by the reader", sorted(self.seen_ms))]
        rows += [
            (f"  {name}", sorted(stages[place] for stages in self.stages_ms))
            for place, name in enumerate(STAGES)
        ]
        rows.append(("seen - sum of stages", self.left_ms))
        lines = [f"first token, ms, {len(self.seen_ms)} requests at {RATE:g} a second"]
        lines += [
            f"  {name:<22} p50 {percentile(values, 0.5):7.2f}   p99 {percentile(values, 0.99):7.2f}"
            for name, values in rows
        ]
        lines.append(f"  within {BAR_MS:g} ms          {self.share:11.1%}   (bar {BAR_SHARE:.0%})")
        return "\n".join(lines)


def measure(num_requests: int = NUM_REQUESTS) -> Stages:
    """Measure on a service of the benchmark's own."""
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name)
        with running_service(data_dir, settings=_SETTINGS) as service:
            endpoint = Endpoint(
                f"http://{service.host}:{service.port}", "scripted", service.api_key
            )
            times = uvloop.run(_ask(endpoint, NUM_WARM_UP + num_requests))[NUM_WARM_UP:]
            time.sleep(WRITTEN_S)
            url = read_env_file(data_dir / SERVERS_FILE)[DATABASE_URL]
            stages = _read(url, [each.answer_id.removeprefix(_PREFIX) for each in times])
    return Stages([1000 * each.first_token_s for each in times], stages)


def main(file: Path | None) -> None:
    """Print the measurement; the exit status says whether the bar was met."""
    result = measure()
    sys.stdout.write(f"{result.table()}\n")
    write_results(file, "stages", result.figures())
    if not result.is_met:
        raise SystemExit(1)


async def _ask(endpoint: Endpoint, count: int) -> list[CompletionTimes]:
    chance = Random(1)
    tasks = []
    for _ in range(count):
        prompt = [chance.randrange(97, 123) for _ in range(chance.choice((10, 60, 200)))]
        tasks.append(asyncio.create_task(complete(endpoint, prompt, chance.randint(5, 40))))
        await asyncio.sleep(chance.expovariate(RATE))
    return await asyncio.gather(*tasks)


def _read(database_url: str, request_ids: Sequence[str]) -> list[list[float]]:
    """The stages of each request, in milliseconds."""
    query = text(
        f"""
        SELECT {", ".join(f"{name}_s" for name in STAGES)} FROM request_stages
        WHERE created_at = :created_at AND request_id = :request_id
        """  # noqa: S608 - words of this file
    )
    database = connect(database_url, "bench", pool_size=1)
    try:
        with database.connect() as connection:
            rows = [
                connection.execute(
                    query, {"created_at": created_at_of(request_id), "request_id": request_id}
                ).one()
                for request_id in request_ids
            ]
    finally:
        database.dispose()
    return [[1000 * (seconds or 0.0) for seconds in row] for row in rows]
