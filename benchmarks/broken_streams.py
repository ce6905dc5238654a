"""What callers see of gateways that die: nothing. And what finance sees of callers that repeat.

Two gateways of a whole service are killed in turn, at random, while streams are read through
`headrace.client`; each is started again at once. A model that says its prompt back tells a word
that is missing from one that comes twice. Then calls race under one key, and calls without one
are dropped before they are answered, which the SDK repeats by itself.

Bars: every text whole, 95 % of the gaps under 1.5 s; one request and one bill for each key and for
each call.
"""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import psycopg

from benchmarks.result_file import write_results
from benchmarks.service_process import ServiceProcess, free_port, running_service
from benchmarks.serving import percentile
from cli.data_dir import key_pepper
from cli.env_file import read_env_file
from cli.settings import SERVERS_FILE
from headrace.client import AsyncHeadrace

MAX_GAP_S = 1.5
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_AT_ONCE = 32
_SETTINGS = {
    "HEADRACE_MAX_NUM_SEQS": "64",
    "HEADRACE_KV_TOKENS": "65536",
    "HEADRACE_SCRIPTED_DELAY_MS": "40",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    num_streams: int = 1000
    num_tokens: int = 100
    kill_every_s: float = 4.0
    num_rounds: int = 100
    num_racing: int = 50
    num_dropped: int = 300


@dataclass(slots=True)
class Figures:
    """What came of it."""

    kills: int = 0
    streams: int = 0
    resumed: int = 0
    wrong_texts: int = 0
    failed: int = 0
    gaps_s: list[float] = field(default_factory=list)
    other_gaps_s: list[float] = field(default_factory=list)
    stream_bills: int = 0
    race_rounds: int = 0
    race_requests: int = 0
    race_bills: int = 0
    race_differing: int = 0
    dropped_calls: int = 0
    drops: int = 0
    thrown_away: int = 0
    dropped_bills: int = 0

    @property
    def gap_p95_s(self) -> float:
        """Longest silence of a stream that was resumed, 95th percentile."""
        return percentile(sorted(self.gaps_s), 0.95)

    @property
    def is_met(self) -> bool:
        """Every bar."""
        return (
            self.wrong_texts == self.failed == self.race_differing == 0
            and self.gap_p95_s <= MAX_GAP_S
            and self.stream_bills == self.streams
            and self.race_requests == self.race_bills == self.race_rounds
            and self.dropped_bills == self.dropped_calls + self.thrown_away
        )

    def table(self) -> str:
        """The figures in words."""
        return "\n".join(
            [
                f"streams          {self.streams} read, {self.kills} gateways killed, "
                f"{self.resumed} streams resumed",
                f"texts            {self.wrong_texts} wrong, {self.failed} failed   (bar: 0, 0)",
                f"gap p50 / p95    {percentile(sorted(self.gaps_s), 0.5):.2f} s / "
                f"{self.gap_p95_s:.2f} s   (bar: {MAX_GAP_S} s; of streams that did not break: "
                f"{percentile(sorted(self.other_gaps_s), 0.5):.2f} s / "
                f"{percentile(sorted(self.other_gaps_s), 0.95):.2f} s)",
                f"bills            {self.stream_bills} for {self.streams} streams",
                f"one key          {self.race_rounds} rounds: {self.race_requests} requests, "
                f"{self.race_bills} bills, {self.race_differing} answers that differ",
                f"no key           {self.dropped_calls} calls, {self.drops} dropped and repeated: "
                f"{self.dropped_bills} bills ({self.thrown_away} had arrived whole and were thrown "
                "away)",
            ]
        )


class Gateways(httpx2.AsyncBaseTransport):
    """Gateways of a running service, and the way to any that says it is ready.

    Counts calls by reader, so that a stream that took several is known.
    """

    def __init__(self, data_dir: Path, count: int = 2) -> None:
        self.num_calls: dict[str, int] = {}
        self._environment = {
            **os.environ,  # noqa: TID251
            **read_env_file(data_dir / SERVERS_FILE),
            "HEADRACE_KEY_PEPPER": key_pepper(data_dir),
            "HEADRACE_TEST_BUILD": "1",
        }
        self._ports = [free_port() for _ in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ready: set[int] = set()
        self._way = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None))

    async def start(self) -> None:
        """Start all, and wait until they answer."""
        self._processes = [self._start(port) for port in self._ports]
        for port in self._ports:
            await self._wait_for(port)

    async def kill_one(self) -> None:
        """Kill one at random, as a crash would; another takes its port and is waited for."""
        number = random.randrange(len(self._ports))
        self._ready.discard(self._ports[number])
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait()
        self._processes[number] = self._start(self._ports[number])
        await self._wait_for(self._ports[number])

    def stop(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
            process.wait()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request to a gateway that is ready, as a load balancer would."""
        reader = request.headers.get("x-reader", "")
        self.num_calls[reader] = self.num_calls.get(reader, 0) + 1
        port = random.choice(sorted(self._ready))
        request.url = request.url.copy_with(port=port)
        return await self._way.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._way.aclose()

    def _start(self, port: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "api.main"],
            env={**self._environment, "HEADRACE_PORT": str(port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def _wait_for(self, port: int) -> None:
        async with httpx2.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    url = f"http://127.0.0.1:{port}/health/ready"
                    if (await client.get(url)).status_code == 200:
                        self._ready.add(port)
                        return
                await asyncio.sleep(0.05)


class Dropping(httpx2.AsyncBaseTransport):
    """Drops the first try of each call before it is answered."""

    def __init__(self, port: int) -> None:
        self.num_drops = 0
        self.num_arrived = 0
        self._port = port
        self._way = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it, and hang up after a while if it is a first try."""
        request.url = request.url.copy_with(port=self._port)
        if request.headers["x-stainless-retry-count"] != "0":
            return await self._way.handle_async_request(request)
        has_arrived = False

        async def trace(event: str, _: object) -> None:
            nonlocal has_arrived
            has_arrived |= event == "http11.receive_response_headers.complete"

        request.extensions = {**request.extensions, "trace": trace}
        try:
            async with asyncio.timeout(random.uniform(0.05, 2.4)):
                return await self._way.handle_async_request(request)
        except TimeoutError as error:
            self.num_drops += 1
            # Thrown away by the caller itself: no server can know, and it is billed.
            self.num_arrived += has_arrived
            raise httpx2.ReadError("dropped") from error


def measure(plan: Plan) -> Figures:
    """All of it, on a service of its own."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name)
        with running_service(data_dir, settings=_SETTINGS) as service:
            asyncio.run(_measure(plan, figures, service, data_dir))
    return figures


async def _measure(plan: Plan, figures: Figures, service: ServiceProcess, data_dir: Path) -> None:
    ledger = Ledger(read_env_file(data_dir / SERVERS_FILE)["DATABASE_URL"])
    async with _client(service, Gateways(data_dir)) as (client, gateways):
        assert isinstance(gateways, Gateways)
        await gateways.start()
        try:
            mark = ledger.mark()
            await _read_streams(plan, figures, client, gateways)
            figures.stream_bills = ledger.bills_since(mark)
            mark = ledger.mark()
            await _race(plan, figures, client)
            figures.race_requests = ledger.requests_since(mark)
            figures.race_bills = ledger.bills_since(mark)
        finally:
            gateways.stop()
    dropping = Dropping(service.port)
    async with _client(service, dropping) as (client, _):
        mark = ledger.mark()
        await _drop(plan, figures, client)
        figures.drops, figures.thrown_away = dropping.num_drops, dropping.num_arrived
        # What was dropped last is cancelled and settled in a moment.
        await asyncio.sleep(3)
        figures.dropped_bills = ledger.bills_since(mark)


async def _read_streams(
    plan: Plan, figures: Figures, client: openai.AsyncOpenAI, gateways: Gateways
) -> None:
    is_over = asyncio.Event()

    async def kill_now_and_then() -> None:
        while not is_over.is_set():
            await asyncio.sleep(plan.kill_every_s * random.uniform(0.5, 1.5))
            await gateways.kill_one()
            figures.kills += 1

    async def read() -> None:
        prompt = _prompt(plan.num_tokens)
        said, gap_s, last = "", 0.0, None
        reader = secrets.token_hex(16)
        stream = AsyncHeadrace(client).completions.stream(
            model="scripted",
            prompt=prompt,
            max_tokens=plan.num_tokens,
            extra_headers={"x-reader": reader},
        )
        figures.streams += 1
        try:
            async for chunk in stream:
                now = time.monotonic()
                gap_s, last = max(gap_s, now - (now if last is None else last)), now
                said += chunk.choices[0].text
        except openai.APIError as error:
            figures.failed += 1
            print(f"failed after {len(said)} tokens: {error!r}", file=sys.stderr)
            return
        figures.wrong_texts += said != prompt
        if gateways.num_calls[reader] > 1:
            figures.resumed += 1
            figures.gaps_s.append(gap_s)
        else:
            figures.other_gaps_s.append(gap_s)

    killer = asyncio.create_task(kill_now_and_then())
    await _at_most(NUM_AT_ONCE, (read() for _ in range(plan.num_streams)))
    is_over.set()
    await killer


async def _race(plan: Plan, figures: Figures, client: openai.AsyncOpenAI) -> None:
    for _ in range(plan.num_rounds):
        key, prompt = secrets.token_hex(16), _prompt(10)
        calls = [
            client.with_raw_response.completions.create(
                model="scripted",
                prompt=prompt,
                max_tokens=10,
                temperature=1,
                extra_headers={"Idempotency-Key": key},
            )
            for _ in range(plan.num_racing)
        ]
        answers = await asyncio.gather(*calls)
        figures.race_rounds += 1
        figures.race_differing += len({answer.content for answer in answers}) - 1


async def _drop(plan: Plan, figures: Figures, client: openai.AsyncOpenAI) -> None:
    # The same words in every call: who repeats must still get its own.
    async def call() -> None:
        await client.completions.create(model="scripted", prompt="x" * 50, max_tokens=50)
        figures.dropped_calls += 1

    await _at_most(NUM_AT_ONCE, (call() for _ in range(plan.num_dropped)))


async def _at_most(count: int, works: Iterable[Awaitable[None]]) -> None:
    places = asyncio.Semaphore(count)

    async def take_place(work: Awaitable[None]) -> None:
        async with places:
            await work

    await asyncio.gather(*map(take_place, works))


@asynccontextmanager
async def _client(
    service: ServiceProcess, transport: httpx2.AsyncBaseTransport
) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx2.AsyncBaseTransport]]:
    http = httpx2.AsyncClient(transport=transport, timeout=60)
    url = f"http://127.0.0.1:{service.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=service.api_key, http_client=http) as sdk:
        yield sdk, transport


class Ledger:
    """What PostgreSQL has of a stretch of time."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url

    def mark(self) -> frozenset[str]:
        """What there is now."""
        return frozenset(str(row[0]) for row in self._rows("SELECT request_id FROM requests"))

    def requests_since(self, mark: frozenset[str]) -> int:
        """Requests that were accepted since."""
        return len(self.mark() - mark)

    def bills_since(self, mark: frozenset[str]) -> int:
        """Requests that were used since and are on an invoice."""
        rows = self._rows(
            "SELECT request_id FROM usage_events u WHERE completion_tokens > 0 AND NOT EXISTS"
            " (SELECT FROM undelivered_requests n WHERE n.request_id = u.request_id)"
        )
        return len({str(row[0]) for row in rows} - mark)

    def _rows(self, query: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self._url) as connection:
            return connection.execute(query.encode()).fetchall()


def _prompt(num_tokens: int) -> str:
    """Letters of which no two neighbours are alike, so that a lost or repeated one shows."""
    said = ""
    while len(said) < num_tokens:
        letter = random.choice(LETTERS)
        said += letter if not said.endswith(letter) else ""
    return said


def main(json: Path | None, plan: Plan) -> None:
    """Measure, print and say by the exit status whether the bars were met."""
    figures = measure(plan)
    print(figures.table())
    shown = {name: getattr(figures, name) for name in Figures.__slots__}
    write_results(json, "broken-streams", shown)
    if not figures.is_met:
        raise SystemExit(1)
