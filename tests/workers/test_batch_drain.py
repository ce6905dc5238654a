"""A process of a draining batch worker ends, whatever hangs in it."""

import subprocess
import sys

# What cannot be ended from within: a task that swallows every cancellation, and a thread that
# the loop waits for. Signals are ignored as Celery's pool has its children ignore them.
HANGING_CHILD = """
import asyncio, os, signal, sys, threading
from workers import batch_drain

async def swallow():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def hang(stop):
    drain.watch(asyncio.get_running_loop(), stop)
    task = asyncio.create_task(swallow())
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    os.write(ready_writer, b"r")
    await stop.wait()
    os.write(stopped_writer, b"s")

batch_drain.CHILD_GRACE_S = 0.1
drain = batch_drain.DrainPipe(0.1)
ready_reader, ready_writer = os.pipe()
stopped_reader, stopped_writer = os.pipe()
pid = os.fork()
if not pid:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    drain.enter_child()
    asyncio.run(hang(asyncio.Event()))
    os._exit(7)
os.read(ready_reader, 1)
if sys.argv[1] == "announced":
    drain.announce()
    os.kill(pid, signal.SIGQUIT)
else:
    os._exit(3)
assert os.read(stopped_reader, 1) == b"s"
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""

HANGING_MAIN = """
import threading
from workers import batch_drain

batch_drain.MAIN_GRACE_S = 0.1
drain = batch_drain.DrainPipe(0.1)
drain.announce()
drain.announce()
threading.Event().wait()
"""


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a script; its output ends when the last process that has it is gone."""
    command = [sys.executable, "-P", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, timeout=30, check=False)


def test_a_child_that_hangs_is_cut_after_the_drain() -> None:
    done = run(HANGING_CHILD, "announced")
    assert done.returncode == 0, done.stderr
    assert b"did not end within" in done.stderr


def test_a_child_that_hangs_does_not_outlive_its_main_process() -> None:
    # The pipes of the output are closed only when the child is gone too.
    assert run(HANGING_CHILD, "killed").returncode == 3


def test_a_main_process_that_hangs_is_cut_after_the_drain() -> None:
    done = run(HANGING_MAIN)
    assert done.returncode == 0, done.stderr
    assert b"did not end within" in done.stderr
