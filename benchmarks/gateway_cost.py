"""What tokens cost in each process of a whole service, HTTP and ledger included.

Readers stream 300 tokens each from a model that computes nothing, as fast as this machine lets
them, and each process's time is divided by the tokens: so much of a core it would take at the
fleet's 84,000 tokens a second, 280 requests a second among them.
"""

import asyncio
import random
import re
import tempfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.completion_client import Endpoint, complete
from benchmarks.process_tree import cpu_seconds_of, tree
from benchmarks.service_process import running_service

FLEET_TOKENS_PER_S = 84_000
_SETTINGS = {
    "HEADRACE_MAX_NUM_SEQS": "64",
    "HEADRACE_KV_TOKENS": "65536",
    "HEADRACE_SCRIPTED_DELAY_MS": "5",
}
# Words of the command lines of a serve's processes, and what they are called here.
_ROLES = {
    "valkey-server": "Valkey",
    "postgres": "PostgreSQL",
    "gateway": "gateway",
    "dispatcher": "dispatcher",
    "replica": "replica without its model",
}


@dataclass(frozen=True, slots=True)
class Readers:
    """How many stream at once, how often each, and how many tokens each time."""

    num_streams: int = 64
    num_requests: int = 256
    num_tokens: int = 300


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """Tokens, seconds by the wall, and seconds of processor time by role."""

    num_tokens: int
    wall_s: float
    cpu_s: dict[str, float]

    def cores(self) -> dict[str, float]:
        """Cores of each role at the fleet's rate."""
        return {
            role: seconds / self.num_tokens * FLEET_TOKENS_PER_S
            for role, seconds in self.cpu_s.items()
        }

    def table(self) -> str:
        """The measurement in words."""
        lines = [
            f"a whole service over HTTP at {self.num_tokens / self.wall_s:,.0f} tokens/s, and the "
            f"cores that {FLEET_TOKENS_PER_S:,} tokens/s would take at its costs",
        ]
        for role, cores in sorted(self.cores().items()):
            each_us = 1e6 * self.cpu_s[role] / self.num_tokens
            lines.append(f"    {role:<26} {cores:6.2f}   ({each_us:.1f} us for a token)")
        return "\n".join(lines)


def measure(readers: Readers) -> GatewayCost:
    """Start a service, let the readers read, and count what its processes used meanwhile."""
    with (
        tempfile.TemporaryDirectory() as data_dir,
        running_service(Path(data_dir), settings=_SETTINGS) as service,
    ):
        url = f"http://{service.host}:{service.port}"
        endpoint = Endpoint(url, "scripted", service.api_key)
        asyncio.run(_read_all(endpoint, Readers(2, 2, 8)))
        before = _cpu_by_role(service.process_id)
        wall_s = asyncio.run(_read_all(endpoint, readers))
        after = _cpu_by_role(service.process_id)
    used = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
    return GatewayCost(readers.num_requests * readers.num_tokens, wall_s, used)


async def _read_all(endpoint: Endpoint, readers: Readers) -> float:
    """Seconds until all requests are answered. Raises CompletionFailed."""
    rng = random.Random(1)
    # The model says its prompt back, a byte at a time.
    prompts = iter(
        [rng.choices(range(32, 127), k=readers.num_tokens) for _ in range(readers.num_requests)]
    )

    async def reader() -> None:
        for prompt in prompts:
            await complete(endpoint, prompt, readers.num_tokens)

    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(reader() for _ in range(readers.num_streams)))
    return loop.time() - started


def _cpu_by_role(service: int) -> dict[str, float]:
    used: defaultdict[str, float] = defaultdict(float)
    for process_id in tree(service):
        with suppress(OSError):
            role = _role_of(process_id)
            if role is not None:
                used[role] += cpu_seconds_of(process_id)
    return used


def _role_of(process_id: int) -> str | None:
    """None for processes that are not on a token's way, such as the batch tier's."""
    line = Path(f"/proc/{process_id}/cmdline").read_bytes().decode(errors="replace")
    words = {Path(word).name.partition(":")[0] for word in re.split("[\0 ]", line)}
    return next((role for word, role in _ROLES.items() if word in words), None)
