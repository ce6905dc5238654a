"""What a fleet's tokens cost on their way to the readers: 84,000 a second through one Valkey.

Seventy simulated replicas publish a step's tokens at a time, on schedule, as a real publisher
does: one call of the server-side function for each step. Four simulated gateways read their
feeds and unpack every token. What is counted is processor time: Valkey's by its own account,
the others' of their processes. If this machine cannot keep the schedule, it says so, and cores
are those that the asked rate would take at the measured cost of a token.

Text, HTTP and the ledger are not part of that; `gateway_cost.py` then measures them in a whole
service.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks import gateway_cost
from benchmarks.result_file import write_results
from benchmarks.serving import percentile
from benchmarks.simulated_fleet import Fleet, Share, assign_all, publish, read
from benchmarks.valkey_process import ValkeyProcess, running_valkey

MAX_VALKEY_CORES = 0.5
# Time for every process to take its place before the first step is due.
LEAD_IN_S = 0.5


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Seconds of processor time by role, for all tokens of the measurement."""

    fleet: Fleet
    wall_s: float
    valkey_s: float
    publishing_s: float
    reading_s: float
    num_read: int
    late_ms_p99: float

    @property
    def tokens_per_s(self) -> float:
        """The rate that was reached."""
        return self.fleet.num_tokens / self.wall_s

    def cores(self, cpu_s: float) -> float:
        """Cores that the asked rate takes of a role which used so much here."""
        return cpu_s / self.fleet.num_tokens * self.fleet.tokens_per_s

    @property
    def is_met(self) -> bool:
        """Nothing lost, and Valkey within its bar."""
        return (
            self.num_read == self.fleet.num_tokens and self.cores(self.valkey_s) <= MAX_VALKEY_CORES
        )

    def figures(self) -> dict[str, float]:
        """What is written to a file."""
        return {
            "tokens_per_s_asked": self.fleet.tokens_per_s,
            "tokens_per_s_reached": self.tokens_per_s,
            "valkey_cores": self.cores(self.valkey_s),
            "publishing_cores": self.cores(self.publishing_s),
            "reading_cores": self.cores(self.reading_s),
            "tokens_lost": float(self.fleet.num_tokens - self.num_read),
            "late_ms_p99": self.late_ms_p99,
        }

    def table(self) -> str:
        """The measurement in words."""
        fleet, figures = self.fleet, self.figures()
        return "\n".join(
            [
                f"{fleet.num_replicas} replicas x {fleet.num_sequences} sequences x "
                f"{fleet.steps_per_s:g} steps/s, {fleet.num_gateways} gateways, one Valkey",
                f"  tokens/s asked, reached  {fleet.tokens_per_s:8,.0f} {self.tokens_per_s:8,.0f}",
                f"  steps late, ms p99       {self.late_ms_p99:8.1f}",
                f"  tokens lost              {figures['tokens_lost']:8.0f}   (bar 0)",
                "  cores at the asked rate",
                f"    Valkey                 {figures['valkey_cores']:8.2f}"
                f"   (bar {MAX_VALKEY_CORES:g})",
                f"    publishing             {figures['publishing_cores']:8.2f}",
                f"    reading                {figures['reading_cores']:8.2f}",
            ]
        )


def measure(fleet: Fleet) -> ControlPlane:
    """Run the fleet against a Valkey of its own."""
    with running_valkey() as valkey:
        assign_all(valkey.client, fleet)
        return _run(valkey, fleet)


def main(file: Path | None) -> None:
    """Print both measurements; the exit status says whether the bars were met."""
    result = measure(Fleet())
    cost = gateway_cost.measure(gateway_cost.Readers())
    sys.stdout.write(f"{result.table()}\n{cost.table()}\n")
    figures = {**result.figures(), "cores_over_http": cost.cores()}
    write_results(file, "control-plane", figures)
    if not result.is_met:
        raise SystemExit(1)


def _run(valkey: ValkeyProcess, fleet: Fleet) -> ControlPlane:
    context = get_context("spawn")
    parts = [_start(context, publish, valkey.url, fleet, n) for n in range(fleet.num_publishers)]
    parts += [_start(context, read, valkey.url, fleet, n) for n in range(fleet.num_gateways)]
    for pipe, _ in parts:
        pipe.recv()  # It has loaded what it needs.
    before = valkey.cpu_seconds()
    start_at = time.monotonic() + LEAD_IN_S
    for pipe, _ in parts:
        pipe.send(start_at)
    shares: list[Share] = [pipe.recv() for pipe, _ in parts]
    wall_s = time.monotonic() - start_at
    valkey_s = valkey.cpu_seconds() - before
    for _, process in parts:
        process.join()
    published, received = shares[: fleet.num_publishers], shares[fleet.num_publishers :]
    late = sorted(late for share in published for late in share.late_ms)
    return ControlPlane(
        fleet=fleet,
        wall_s=wall_s,
        valkey_s=valkey_s,
        publishing_s=sum(share.cpu_s for share in published),
        reading_s=sum(share.cpu_s for share in received),
        num_read=sum(share.num_tokens for share in received),
        late_ms_p99=percentile(late, 0.99),
    )


def _start(
    context: SpawnContext,
    target: Callable[[Connection, str, Fleet, int], None],
    url: str,
    fleet: Fleet,
    number: int,
) -> tuple[Connection, BaseProcess]:
    """A process of the simulation, and the pipe that it says things through."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, url, fleet, number), daemon=True)
    process.start()
    theirs.close()  # So that a process which dies is noticed, not waited for.
    return ours, process
