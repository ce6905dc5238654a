"""What the service adds to the first token: gateway, Redis, dispatcher, replica shell.

The same scripted engine is asked in two ways, turn by turn in one run: in this process, from
`try_submit` to the first update, and over HTTP through a whole `headrace serve`, from the first
byte sent to the first chunk with text. The engine computes nothing and is idle, so the
difference is ours.
"""

import http.client
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service_process import running_service
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.loop import EngineLoop

NUM_WARM_UP = 20
NUM_ROUNDS = 300
MAX_TOKENS = 2
PROMPT = "Sixty-four tokens of a prompt that comes back, a byte at a time."
BAR_MS = 10.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds to the first token, request by request, in both ways."""

    in_process_ms: Sequence[float]
    over_http_ms: Sequence[float]

    @property
    def added_p50_ms(self) -> float:
        """What the service adds at the median."""
        return statistics.median(self.over_http_ms) - statistics.median(self.in_process_ms)

    def table(self) -> str:
        """The measurement in words."""
        rows = [("engine in process", self.in_process_ms), ("over HTTP", self.over_http_ms)]
        lines = [f"first token, ms, {len(self.over_http_ms)} requests one after another"]
        for name, values in rows:
            p50, p95 = statistics.median(values), statistics.quantiles(values, n=20)[18]
            lines.append(f"  {name:<18} p50 {p50:7.2f}   p95 {p95:7.2f}")
        lines.append(f"  added              p50 {self.added_p50_ms:7.2f}   (bar {BAR_MS:g})")
        return "\n".join(lines)


def measure(num_rounds: int = NUM_ROUNDS) -> Overhead:
    """Start a service and an engine, ask both in turn, stop both."""
    loop = EngineLoop(_scripted_engine())
    loop.start()
    in_process, over_http = [], []
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as service:
        connection = http.client.HTTPConnection(service.host, service.port, timeout=30)
        for number in range(NUM_WARM_UP + num_rounds):
            direct = _ask_engine(loop)
            served = _ask_service(connection, service.api_key)
            if number >= NUM_WARM_UP:
                in_process.append(direct)
                over_http.append(served)
        connection.close()
    loop.stop()
    return Overhead(in_process, over_http)


def main() -> None:
    """Print the measurement; the exit status says whether the bar was met."""
    overhead = measure()
    sys.stdout.write(overhead.table() + "\n")
    if overhead.added_p50_ms > BAR_MS:
        raise SystemExit(1)


def _scripted_engine() -> Engine:
    settings = EngineSettings()
    limits = ModelLimits(259, 512, frozenset({258}))
    return Engine(ScriptedRunner(limits, settings.num_blocks, settings.block_size), settings)


def _ask_engine(loop: EngineLoop) -> float:
    request = GenerationRequest(
        request_id=secrets.token_hex(13),
        prompts=(tuple(PROMPT.encode()),),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )
    started = time.perf_counter()
    loop.try_submit(request)
    first = None
    is_over = False
    while not is_over:
        for update in loop.updates.get(10) or ():
            if update.token_ids and first is None:
                first = time.perf_counter()
            is_over = is_over or update.end is not None
    assert first is not None
    return (first - started) * 1000


def _ask_service(connection: http.client.HTTPConnection, api_key: str) -> float:
    body = json.dumps(
        {
            "model": "scripted",
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
    )
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    first = None
    for line in response:
        if first is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
            first = time.perf_counter()
    if first is None:
        raise RuntimeError(f"HTTP {response.status} and no token")
    return (first - started) * 1000
