"""Children start in order, come back with backoff, and end in reverse order or with us."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from cli.child import ChildDidNotStart, ChildSpec, always_ready
from cli.restart_policy import RestartPolicy
from cli.supervisor import Supervisor, drain_on_signals
from tests.cli.waiting import eventually, eventually_blocking

# `wait` lets the shell act on a signal at once; the sleeper is what a child leaves behind.
STAYS = "trap 'echo {name} >> ended; exit 0' TERM; touch {name}.up; sleep 600 & wait"


@dataclass(frozen=True)
class Immediately(RestartPolicy):
    """Restarts without waiting, and keeps the waits that it was asked for."""

    asked: list[int] = field(default_factory=list)

    def delay_s(self, failures: int) -> float:
        self.asked.append(failures)
        return 0.0


@dataclass
class Stage:
    """A supervisor in a folder of its own, and what it reported."""

    folder: Path
    policy: Immediately
    reports: list[str]
    supervisor: Supervisor

    def child(self, name: str, script: str = STAYS, **more: float | Path) -> ChildSpec:
        is_ready = self.is_there(f"{name}.up") if script == STAYS else always_ready
        return ChildSpec(
            name=name,
            argv=("/bin/sh", "-c", script.format(name=name)),
            environment={"PATH": "/usr/bin:/bin"},
            is_ready=is_ready,
            folder=self.folder,
            **more,  # type: ignore[arg-type]  # a test's own keyword arguments
        )

    def is_there(self, name: str) -> Callable[[], Awaitable[bool]]:
        async def is_ready() -> bool:
            return (self.folder / name).exists()

        return is_ready

    def ended(self) -> list[str]:
        return (self.folder / "ended").read_text().split()


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    policy = Immediately()
    reports: list[str] = []
    supervisor = Supervisor(tmp_path / "logs", policy, reports.append)
    yield Stage(tmp_path, policy, reports, supervisor)
    await supervisor.stop()


async def test_a_child_starts_only_when_the_one_before_it_is_ready(stage: Stage) -> None:
    first = stage.child(
        "first", "while [ ! -e go ]; do sleep 0.01; done; touch first.up; sleep 600"
    )
    waiting = ChildSpec(
        "first", first.argv, first.environment, stage.is_there("first.up"), folder=stage.folder
    )

    async def start_both() -> None:
        await stage.supervisor.add(waiting)
        await stage.supervisor.add(stage.child("second"))

    starting = asyncio.create_task(start_both())
    await eventually((stage.folder / "logs" / "first.log").exists)
    assert "second" not in stage.supervisor.names

    (stage.folder / "go").touch()
    await starting
    assert stage.supervisor.names == ("first", "second")


async def test_children_end_in_the_reverse_order_of_their_start(stage: Stage) -> None:
    for name in ("one", "two", "three"):
        await stage.supervisor.add(stage.child(name))

    await stage.supervisor.stop()

    assert stage.ended() == ["three", "two", "one"]
    assert stage.supervisor.names == ()


async def test_a_killed_child_comes_back(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("worker"))
    before = stage.supervisor.pid_of("worker")
    assert before is not None

    os.kill(before, signal.SIGKILL)

    await eventually(lambda: stage.supervisor.pid_of("worker") not in {None, before})
    await eventually(lambda: "worker is back." in stage.reports)
    assert "SIGKILL" in stage.reports[0]


async def test_failures_in_a_row_are_counted_for_the_backoff(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("flaky", "exit 3"))

    await eventually(lambda: len(stage.policy.asked) >= 5)

    assert stage.policy.asked[:5] == [1, 2, 3, 4, 5]
    assert "exit status 3" in stage.reports[0]


async def test_children_are_added_and_removed_while_others_run(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("stays"))
    await stage.supervisor.add(stage.child("goes"))
    pid = stage.supervisor.pid_of("stays")

    await stage.supervisor.remove("goes")
    await stage.supervisor.add(stage.child("comes"))

    assert stage.supervisor.names == ("stays", "comes")
    assert stage.supervisor.pid_of("stays") == pid
    assert stage.ended() == ["goes"]


async def test_a_name_is_given_to_one_child_only(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("worker"))

    with pytest.raises(ValueError, match="worker"):
        await stage.supervisor.add(stage.child("worker"))


async def test_a_child_that_cannot_start_is_reported_with_its_last_words(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("healthy"))
    broken = ChildSpec(
        "broken",
        ("/bin/sh", "-c", "echo no such database; exit 7"),
        {},
        stage.is_there("never"),
    )

    with pytest.raises(ChildDidNotStart, match=r"(?s)broken.*exit status 7.*no such database"):
        await stage.supervisor.add(broken)

    assert stage.supervisor.names == ("healthy",)


async def test_a_command_that_does_not_exist_is_named(stage: Stage) -> None:
    missing = ChildSpec("missing", ("/no/such/program",), {}, stage.is_there("never"))

    with pytest.raises(ChildDidNotStart, match="/no/such/program"):
        await stage.supervisor.add(missing)


async def test_a_child_that_is_never_ready_is_ended_when_its_time_is_up(stage: Stage) -> None:
    slow = ChildSpec(
        "slow",
        ("/bin/sh", "-c", "sleep 600"),
        {"PATH": "/usr/bin:/bin"},
        stage.is_there("never"),
        lock=stage.folder / "lock",
        start_timeout_s=0.2,
    )

    with pytest.raises(ChildDidNotStart, match=r"not ready after 0\.2 s"):
        await stage.supervisor.add(slow)

    await eventually(lambda: is_free(stage.folder / "lock"))


async def test_a_child_that_does_not_listen_is_killed_after_its_grace(stage: Stage) -> None:
    deaf = "trap '' TERM; touch {name}.up; while :; do sleep 600; done"
    spec = ChildSpec(
        "deaf",
        ("/bin/sh", "-c", deaf.format(name="deaf")),
        {"PATH": "/usr/bin:/bin"},
        stage.is_there("deaf.up"),
        lock=stage.folder / "lock",
        folder=stage.folder,
        grace_s=0.1,
    )
    await stage.supervisor.add(spec)

    await stage.supervisor.stop()

    await eventually(lambda: is_free(stage.folder / "lock"))


async def test_whoever_keeps_a_stop_waiting_is_named_and_nobody_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = "trap '' TERM; touch {name}.up; exec /bin/sleep 600"
    await stage.supervisor.add(stage.child("quick", grace_s=7.0))
    await stage.supervisor.add(stage.child("slow", stubborn, grace_s=0.5))
    await eventually((stage.folder / "slow.up").exists)
    assert stage.supervisor.longest_stop_s == 7.5
    monkeypatch.setattr("cli.supervisor._PATIENCE_S", 0.1)

    await stage.supervisor.remove("slow")
    assert stage.reports == ["Waiting for slow to finish (up to 0.5 s)."]
    monkeypatch.undo()
    await stage.supervisor.stop()
    assert len(stage.reports) == 1
    assert stage.supervisor.longest_stop_s == 0


async def test_what_a_child_leaves_behind_is_swept_up(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("parent", lock=stage.folder / "lock"))
    assert not is_free(stage.folder / "lock")

    await stage.supervisor.stop()

    # The sleeper that the shell started had inherited the lock.
    await eventually(lambda: is_free(stage.folder / "lock"))


async def test_a_terminals_ctrl_c_does_not_reach_the_children(stage: Stage) -> None:
    await stage.supervisor.add(stage.child("worker"))
    pid = stage.supervisor.pid_of("worker")
    assert pid is not None

    assert os.getpgid(pid) == pid != os.getpgid(0)


async def test_an_earlier_run_that_still_lives_keeps_a_new_one_from_starting(stage: Stage) -> None:
    lock = stage.folder / "lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ChildDidNotStart, match="earlier run still holds"):
            await stage.supervisor.add(stage.child("late", lock=lock, start_timeout_s=0.1))

    await stage.supervisor.add(stage.child("late", lock=lock))


async def test_the_first_signal_asks_to_drain_and_the_second_is_harmless() -> None:
    requested = drain_on_signals()
    loop = asyncio.get_running_loop()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(requested.wait(), 5)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        assert requested.is_set()
    finally:
        for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(which)


async def test_a_long_log_is_cut_to_its_end_at_the_next_start(stage: Stage) -> None:
    logs = stage.folder / "logs"
    (logs / "worker.log").write_bytes(b"old\n" * 2_000_000)

    await stage.supervisor.add(stage.child("worker"))

    assert (logs / "worker.log").stat().st_size < 1000
    assert (logs / "worker.log.1").stat().st_size == 5_000_000


def test_killing_the_supervisor_takes_its_children_along(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from cli.child import ChildSpec
from cli.restart_policy import RestartPolicy
from cli.supervisor import Supervisor

async def main():
    folder = Path({str(tmp_path)!r})
    supervisor = Supervisor(folder / "logs", RestartPolicy(), print)
    for name in ("one", "two"):
        command = ("/bin/sh", "-c", "trap '' TERM; exec /bin/sleep 600")
        await supervisor.add(ChildSpec(name, command, {{}}, lock=folder / name))
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        assert not is_free(tmp_path / "one")
        supervisor.kill()

    eventually_blocking(lambda: is_free(tmp_path / "one") and is_free(tmp_path / "two"))


def is_free(lock: Path) -> bool:
    """True if nobody who could have inherited the lock lives."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
