"""What goes wrong, in an order that a seed decides."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import psycopg
import redis.asyncio

from control.faults import FAULT_POINTS
from tests.faults.fleet import Fleet
from tests.servers import Servers

# How long a process that is armed may take to come to its point, and be stopped by SIGSTOP.
ARMED_S = 15.0
STOPPED_S = 7.0
NUM_LOSSES = 3
# What is armed for these is reached only after a replica has died.
AFTER_A_REPLICA = {"inbox.after_fence", "sweep.before_requeue"}
OTHERS = (
    "kill gateway",
    "kill replica",
    "kill replica",
    "kill dispatcher",
    "kill maintenance",
    "stop replica",
    "restart PostgreSQL",
    "lose PostgreSQL",
    "flush Valkey",
)


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing that goes wrong: words of `OTHERS`, or a fault point and its how manieth hit."""

    what: str
    hit: int = 0


def blows(chance: Random, rounds: int, others: Sequence[str] = OTHERS) -> list[Blow]:
    """Every fault point and everything else so many times, shuffled round by round."""
    found = []
    for _ in range(rounds):
        of_round = [Blow(name, chance.choice((1, 1, 2, 5))) for name in FAULT_POINTS]
        of_round += [Blow(what) for what in others]
        chance.shuffle(of_round)
        found += of_round
    return found


class Chaos:
    """Deals the blows, brings everybody back, and counts."""

    def __init__(self, fleet: Fleet, servers: Servers, chance: Random) -> None:
        self._fleet = fleet
        self._servers = servers
        self._chance = chance
        self.num_kills = 0
        self.dealt: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        # Who ended otherwise than by being killed.
        self.left: Counter[str] = Counter()

    async def deal(self, blow: Blow) -> None:
        """Let one thing go wrong, and bring back whoever died of it."""
        if blow.what in FAULT_POINTS:
            await self._die_at(blow)
        else:
            verb, _, whom = blow.what.partition(" ")
            await getattr(self, f"_{verb}")(whom)
            self.dealt[blow.what] += 1
        self.bring_back()

    def bring_back(self) -> None:
        """Start everybody who has ended, as a supervisor does."""
        for name in self._fleet.names:
            if self._fleet.is_alive(name):
                continue
            status = self._fleet.status(name)
            if status != -signal.SIGKILL:
                self.left[f"{name.partition('-')[0]} with status {status}"] += 1
            self._fleet.start(name)

    async def _die_at(self, blow: Blow) -> None:
        command = FAULT_POINTS[blow.what].process
        name = self._one_of(command)
        await self._kill_one(name)
        hit = 1 if command in ("maintenance", "dispatcher") else blow.hit
        self._fleet.start(name, f"{blow.what}:{hit}")
        if blow.what in AFTER_A_REPLICA:
            await asyncio.sleep(1.0)
            await self._kill_one(self._other_than(name, "replica"))
        if blow.what == "expire.before_commit":
            await self._flush("Valkey")
        for _ in range(int(ARMED_S / 0.05)):
            if not self._fleet.is_alive(name):
                break
            await asyncio.sleep(0.05)
        if self._fleet.is_alive(name):
            self.missed[blow.what] += 1
            await self._kill_one(name)
        elif self._fleet.status(name) == -signal.SIGKILL:
            self.num_kills += 1
            self.dealt[blow.what] += 1
        else:
            self.missed[blow.what] += 1

    async def _kill(self, command: str) -> None:
        await self._kill_one(self._one_of(command))

    async def _kill_one(self, name: str) -> None:
        if self._fleet.is_alive(name):
            await asyncio.to_thread(self._fleet.kill, name)
            self.num_kills += 1

    async def _stop(self, command: str) -> None:
        """Let one hang until it is taken for dead, and speak again."""
        name = self._one_of(command)
        self._fleet.signal(name, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        self._fleet.signal(name, signal.SIGCONT)

    async def _restart(self, _: str) -> None:
        """End PostgreSQL in the middle of everything; it recovers from its log."""
        pid = self._servers.supervisor.pid_of("postgres")
        if pid is not None:
            os.kill(pid, signal.SIGQUIT)
            self.num_kills += 1
            await self._until_back(pid)

    async def _lose(self, whom: str) -> None:
        """End PostgreSQL again whenever it is back: each time it stays away longer, for seconds."""
        for _ in range(NUM_LOSSES):
            await self._restart(whom)

    async def _until_back(self, pid: int) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self._servers.supervisor.pid_of("postgres") not in {None, pid}:
                with suppress(psycopg.OperationalError):
                    url = self._servers.postgres.url
                    await (await psycopg.AsyncConnection.connect(url)).close()
                    return

    async def _flush(self, _: str) -> None:
        """Let Valkey lose everything."""
        client = redis.asyncio.Redis.from_url(self._servers.valkey.url)
        try:
            await client.flushall()
        finally:
            await client.aclose()

    def _one_of(self, command: str) -> str:
        return self._chance.choice([n for n in self._fleet.names if n.startswith(f"{command}-")])

    def _other_than(self, name: str, command: str) -> str:
        found = [n for n in self._fleet.names if n.startswith(f"{command}-") and n != name]
        return self._chance.choice(found)
