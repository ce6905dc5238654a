"""Keeps the children of one machine alive, in order.

Children start one after another, each when the one before is ready; they stop in the reverse
order, each with its own grace. A child that dies comes back after a growing wait. Children may
be added and removed at any time. If the supervisor itself is killed, the kernel ends them.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.child import ChildDidNotStart, ChildRun, ChildSpec, describe_status
from cli.restart_policy import RestartPolicy

_PATIENCE_S = 1.0


@dataclass(slots=True)
class _Child:
    """A child under supervision: its present run, if any, and the task that keeps it alive."""

    spec: ChildSpec
    run: ChildRun | None = None
    keeper: asyncio.Task[None] | None = None


class Supervisor:
    """Owns the children; `report` is told in words what happens to them after their start."""

    def __init__(self, logs: Path, policy: RestartPolicy, report: Callable[[str], None]) -> None:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs = logs
        self._policy = policy
        self._report = report
        self._children: dict[str, _Child] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The children under supervision, in the order of their start."""
        return tuple(self._children)

    @property
    def longest_stop_s(self) -> float:
        """The longest that `stop` may take now: each child's grace, one after another."""
        return sum(child.spec.grace_s for child in self._children.values())

    def pid_of(self, name: str) -> int | None:
        """The process id of a child's present run, or None between two runs."""
        run = self._children[name].run
        return None if run is None else run.pid

    async def add(self, spec: ChildSpec) -> None:
        """Start a child and wait until it is ready. Raises ChildDidNotStart; it is then gone."""
        if spec.name in self._children:
            raise ValueError(f"there is a child named {spec.name} already")
        child = self._children[spec.name] = _Child(spec)
        try:
            await self._bring_up(child)
        except (ChildDidNotStart, OSError):
            del self._children[spec.name]
            raise
        child.keeper = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")

    async def remove(self, name: str) -> None:
        """Drain one child and forget it; a wait that can be noticed is reported."""
        child = self._children[name]
        if child.keeper is not None:
            child.keeper.cancel()
            await asyncio.wait([child.keeper])
        if child.run is not None:
            stopping = asyncio.ensure_future(child.run.stop())
            if not (await asyncio.wait([stopping], timeout=_PATIENCE_S))[0]:
                self._report(f"Waiting for {name} to finish (up to {child.spec.grace_s:g} s).")
            await stopping
        del self._children[name]

    async def stop(self) -> None:
        """Drain every child, the last started first."""
        for name in reversed(self.names):
            await self.remove(name)

    async def _bring_up(self, child: _Child) -> None:
        child.run = await ChildRun.start(child.spec, self._logs)
        await child.run.become_ready()

    async def _keep(self, child: _Child) -> None:
        """Start the child again whenever it ends, for as long as it is ours."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            assert child.run is not None
            started_at = loop.time()
            reason = f"ended with {describe_status(await child.run.wait())}"
            if last_line := child.run.last_lines().rpartition("\n")[2]:
                reason += f" ({last_line})"
            failures = self._policy.failures_after(failures, loop.time() - started_at)
            while not await self._restart(child, reason, self._policy.delay_s(failures)):
                reason = "did not start again"
                failures += 1

    async def _restart(self, child: _Child, reason: str, delay_s: float) -> bool:
        child.run = None
        self._report(f"{child.spec.name} {reason}; it starts again in {delay_s:.1f} s.")
        await asyncio.sleep(delay_s)
        try:
            await self._bring_up(child)
        except (ChildDidNotStart, OSError) as error:
            self._report(str(error))
            return False
        self._report(f"{child.spec.name} is back.")
        return True


def drain_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM, SIGINT or SIGHUP sets; further ones change nothing."""
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(which, requested.set)
    return requested
