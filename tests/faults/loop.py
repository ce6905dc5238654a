"""The fault loop: requests that end in every way there is, while everything that can die dies.

    python -m tests.faults.loop --seed 7 --requests 2000 --rounds 3

Afterwards nothing may be missing: every request that was accepted has one ending and one usage row,
every answer is a beginning of what the model had to say, who was told a usage finds it in the
ledger, and no law of the ledger is broken. The seed decides what is asked and what goes wrong, in
which order; when exactly, the machine decides.
"""

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import cast

import psycopg

from benchmarks.service_process import free_port
from cli.demo_access import grant_demo_access
from cli.registering import register_model
from control.database.connection import connect, connect_async
from control.errors import RequestLost
from control.metering.balance import Balance
from control.metering.ledger import compare
from control.metering.step_log import STEP_LOG_FOLDER
from tests.faults.callers import Callers, Manner, Outcome, wishes
from tests.faults.chaos import Blow, Chaos, blows
from tests.faults.fleet import Fleet
from tests.servers import Servers, running_servers

NUM_GATEWAYS = 2
NUM_REPLICAS = 2
# More than both replicas run at once, so that some wait.
NUM_CALLERS = 16
SETTLED_S = 100.0
PAUSE_S = 0.5


@dataclass(slots=True)
class Service:
    """The processes, and where they keep what they know."""

    fleet: Fleet
    servers: Servers
    database_url: str
    data_dir: Path
    callers: Callers


@dataclass(slots=True)
class Report:
    """What was done, what came of it, and what is wrong."""

    num_requests: int = 0
    num_kills: int = 0
    num_accepted: int = 0
    by_manner: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    dealt: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield f"{self.num_requests} requests, {self.num_accepted} of them accepted"
        yield f"{self.num_kills} kills"
        for title, counts in (
            ("asked to end by", self.by_manner),
            ("ended as", self.endings),
            ("went wrong", self.dealt),
            ("armed for and not reached", self.missed),
            ("left by themselves", self.left),
            ("tokens, and requests untold or open", self.tokens),
        ):
            yield f"{title}:"
            yield from (f"  {count:6}  {name}" for name, count in sorted(counts.items()))
        yield f"wrong: {len(self.wrong)}"
        yield from (f"  {line}" for line in self.wrong[:50])


@contextmanager
def running_service(folder: Path, expire_after_s: float) -> Iterator[Service]:
    """A whole service of the scripted model, in processes that can be killed one by one."""
    with running_servers() as servers:
        database_url = servers.new_database()
        data_dir, logs = folder / "data", folder / "logs"
        data_dir.mkdir()
        logs.mkdir()
        pepper = secrets.token_hex(32)
        model = register_model(database_url, "scripted", data_dir / "weights", True, print)
        environment = {
            "DATABASE_URL": database_url,
            "REDIS_URL": servers.valkey.url,
            "CELERY_BROKER_URL": servers.valkey.broker_url,
            "HEADRACE_KEY_PEPPER": pepper,
            "HEADRACE_DATA_DIR": str(data_dir),
            "HEADRACE_MODEL": model.pinned_name,
            "HEADRACE_TEST_BUILD": "1",
            "HEADRACE_SCRIPTED_DELAY_MS": "4",
            "HEADRACE_MAX_NUM_SEQS": "6",
            "HEADRACE_CHUNK_SIZE": "32",
            "HEADRACE_KV_TOKENS": "8192",
            "HEADRACE_EXPIRE_AFTER_S": str(expire_after_s),
        }
        ports = [free_port() for _ in range(NUM_GATEWAYS)]
        each = {f"gateway-{n}": {"HEADRACE_PORT": str(port)} for n, port in enumerate(ports)}
        each |= {f"replica-{n}": {} for n in range(NUM_REPLICAS)}
        each |= {"dispatcher-0": {}, "maintenance-0": {}}
        fleet = Fleet(environment, each, logs)
        access = asyncio.run(_key(database_url, pepper, data_dir))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        fleet.start_all()
        try:
            yield Service(
                fleet, servers, database_url, data_dir, Callers(urls, access, model.model)
            )
        finally:
            fleet.stop()


async def _key(database_url: str, pepper: str, data_dir: Path) -> str:
    engine = connect_async(database_url, "test", pool_size=1)
    try:
        async with engine.connect() as connection:
            access = await grant_demo_access(
                connection, bytes.fromhex(pepper), data_dir, "http://127.0.0.1/v1"
            )
            return access.api_key
    finally:
        await engine.dispose()


async def run(
    service: Service, seed: int, num_requests: int, order: list[Blow], pause_s: float = PAUSE_S
) -> Report:
    """Ask and kill until all has been asked and everything has gone wrong; then look."""
    report = Report()
    chaos = Chaos(service.fleet, service.servers, Random(seed + 1))
    await _until_served(service)
    endless = wishes(Random(seed), NUM_GATEWAYS)
    outcomes: list[Outcome] = []
    is_over = asyncio.Event()

    async def ask() -> None:
        while not (is_over.is_set() and len(outcomes) >= num_requests):
            outcome = await service.callers.ask(next(endless))
            outcomes.append(outcome)
            if outcome.status is None or outcome.status >= 500:
                # It is coming back.
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CALLERS):
            group.create_task(ask())
        for number, blow in enumerate(order):
            await asyncio.sleep(pause_s)
            print(f"{number + 1}/{len(order)} {blow}, {len(outcomes)} asked", flush=True)
            await chaos.deal(blow)
        is_over.set()
    report.num_requests, report.num_kills = len(outcomes), chaos.num_kills
    report.dealt, report.missed, report.left = chaos.dealt, chaos.missed, chaos.left
    report.by_manner.update(outcome.wish.manner.value for outcome in outcomes)
    await _until_settled(service, report)
    check(service, outcomes, report)
    await _until_booked(service)
    _verify(service, report)
    return report


async def _until_served(service: Service) -> None:
    probe = next(wishes(Random(0), NUM_GATEWAYS))
    give_up = time.monotonic() + 60
    for gateway in range(NUM_GATEWAYS):
        wish = replace(probe, gateway=gateway, manner=Manner.FINISH, deadline_ms=30_000)
        while not (await service.callers.ask(wish)).is_whole:
            assert time.monotonic() < give_up, "the service does not start"
            await asyncio.sleep(0.1)


async def _until_settled(service: Service, report: Report) -> None:
    give_up = time.monotonic() + SETTLED_S
    held: list[tuple[object, ...]] = []
    while time.monotonic() < give_up:
        held = sql(service, "SELECT request_id FROM requests WHERE state = 'held'")
        if not held:
            return
        await asyncio.sleep(0.2)
    report.wrong += [f"request {request_id} has no ending" for (request_id,) in held]


async def _until_booked(service: Service) -> None:
    """Wait for maintenance to book what the dead had produced."""
    give_up = time.monotonic() + SETTLED_S
    is_even = False
    while not is_even and time.monotonic() < give_up:
        await asyncio.sleep(0.5)
        is_even = (await asyncio.to_thread(_counts, service)).is_even


def _counts(service: Service) -> Balance:
    database = connect(service.database_url, "test")
    try:
        with database.connect() as connection:
            return compare(connection, service.data_dir / STEP_LOG_FOLDER)
    finally:
        database.dispose()


def _verify(service: Service, report: Report) -> None:
    """The three counts, and the laws of the ledger."""
    found = _counts(service)
    report.tokens.update(produced=found.produced, delivered=found.delivered, billed=found.billed)
    report.tokens.update({f"wasted {reason}": n for reason, n in found.wasted.items()})
    report.tokens.update(untold=len(found.untold), open=found.num_open)
    report.wrong += [f"counts differ: {off}" for off in found.off]
    if found.delivered != found.billed:
        report.wrong.append(f"delivered {found.delivered}, billed {found.billed}")
    laws = sql(service, "SELECT law, request_id, detail FROM invariant_violations")
    report.wrong += [f"{law}: {request_id}: {detail}" for law, request_id, detail in laws]


def sql(service: Service, query: str) -> list[tuple[object, ...]]:
    """Rows of a query."""
    with psycopg.connect(service.database_url) as connection:
        return connection.execute(query.encode()).fetchall()


def check(service: Service, outcomes: list[Outcome], report: Report) -> None:
    """Add to the report whatever is wrong."""
    rows = sql(
        service,
        """
        SELECT r.request_id, r.state, r.error_code, u.outcome, u.prompt_tokens,
               u.completion_tokens, count(u.request_id) OVER (PARTITION BY r.request_id)
        FROM requests r LEFT JOIN usage_events u USING (created_at, request_id)
        """,
    )
    ledger = {str(row[0]): row for row in rows}
    report.num_accepted = len(ledger)
    for request_id, state, error, outcome, _, _, num_rows in rows:
        report.endings[f"{state} {error or ''}".strip()] += 1
        if outcome != state or num_rows != 1:
            report.wrong.append(f"request {request_id} is {state}, billed {num_rows} as {outcome}")
    for told in outcomes:
        report.wrong += _lies(told, ledger.get(told.request_id))


def _lies(told: Outcome, row: tuple[object, ...] | None) -> Iterator[str]:
    """What a caller was told and is not so."""
    if told.status is None or told.status >= 300:
        return
    wish, name = told.wish, f"request {told.request_id} ({told.wish.manner})"
    if row is None:
        yield f"{name} was answered and has no row"
        return
    for choice, text in told.texts.items():
        if not wish.expected_text.startswith(text):
            yield f"{name} choice {choice} said {text!r}, not {wish.expected_text!r}"
    # One character is one token here. What Valkey and a replica lost together nobody can bill.
    num_heard = sum(map(len, told.texts.values()))
    if row[2] != RequestLost.code and num_heard > cast("int", row[5]):
        yield f"{name} heard {num_heard} tokens and was billed {row[5]}"
    # Of a request that Valkey has lost the gateway tells what it has counted itself.
    is_known = told.usage is not None and told.error != RequestLost.code
    if is_known and told.usage != row[4:6]:
        yield f"{name} was told the usage {told.usage} {told.error} and billed {row[4:6]} {row[2]}"
    if told.usage is not None and not told.error and len(told.texts) != wish.n:
        yield f"{name} ended well with {len(told.texts)} of {wish.n} choices"


def main() -> None:
    """Run the loop and say what came of it; status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        Path(folder).chmod(0o711)
        with running_service(Path(folder), expire_after_s=5.0) as service:
            order = blows(Random(options.seed), options.rounds)
            report = asyncio.run(run(service, options.seed, options.requests, order))
    print("\n".join(report.lines()))
    sys.exit(bool(report.wrong or report.missed.keys() - report.dealt.keys()))


if __name__ == "__main__":
    main()
