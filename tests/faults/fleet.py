"""The service's processes, made to be killed: each is back in a moment.

A server process has imported everything and forks whoever is to start, so that a start takes a
fraction of a second and a hundred kills some minutes.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

MODULES = {
    "gateway": "api.main",
    "dispatcher": "workers.dispatcher",
    "replica": "workers.replica",
    "maintenance": "workers.maintenance",
}
PATIENCE_S = 20.0

_PR_SET_PDEATHSIG = 1


class Fleet:
    """Processes by name: what they are, a hyphen, and a number."""

    def __init__(
        self,
        environment: Mapping[str, str],
        each: Mapping[str, Mapping[str, str]],
        logs: Path,
    ) -> None:
        """`environment` is everybody's, `each` says who there is and what else they are told."""
        self._environment = environment
        self._each = each
        self._logs = logs
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(MODULES.values()))
        self._running: dict[str, ForkServerProcess] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody."""
        return tuple(self._each)

    def start_all(self) -> None:
        """Start everybody."""
        for name in self.names:
            self.start(name)

    def start(self, name: str, fault: str = "") -> None:
        """Start a process that is not running, to die at `fault` if it comes there."""
        assert not self.is_alive(name)
        environment = {**self._environment, **self._each[name], "HEADRACE_FAULT": fault}
        module = MODULES[name.partition("-")[0]]
        process = self._context.Process(
            target=become, args=(module, environment, self._logs / f"{name}.log"), name=name
        )
        process.start()
        self._running[name] = process

    def is_alive(self, name: str) -> bool:
        """Whether it runs, be it stopped."""
        process = self._running.get(name)
        return process is not None and process.is_alive()

    def kill(self, name: str) -> None:
        """kill -9; it is gone on return."""
        process = self._running[name]
        process.kill()
        process.join(PATIENCE_S)
        assert not process.is_alive(), f"{name} outlives SIGKILL"

    def signal(self, name: str, which: signal.Signals) -> None:
        """Send it a signal."""
        pid = self._running[name].pid
        assert pid is not None
        os.kill(pid, which)

    def status(self, name: str) -> int | None:
        """With what it ended: less than 0 by a signal, None while it runs."""
        return self._running[name].exitcode

    def stop(self) -> None:
        """SIGTERM for everybody, and SIGKILL for who does not mind it."""
        living = [process for process in self._running.values() if process.is_alive()]
        for process in living:
            process.terminate()
        give_up = time.monotonic() + PATIENCE_S
        for process in living:
            process.join(max(0.1, give_up - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(PATIENCE_S)


def become(module: str, environment: Mapping[str, str], log: Path) -> None:
    """Be one of the service's processes from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    importlib.import_module(module).main()
