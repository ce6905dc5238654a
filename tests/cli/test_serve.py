"""`headrace serve` whole: every real process, with the scripted model in place of a real one."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from cli.demo_access import DEMO_FILE
from cli.env_file import read_env_file
from cli.processes import headrace
from cli.ready_block import QUESTION
from cli.settings import SERVERS_FILE
from tests.cli.waiting import eventually_blocking
from tests.servers import Servers

READY = "Headrace is ready"
START_LIMIT_S = 120


class Serve:
    """One `headrace serve` in the foreground of nobody."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.data_dir = folder / "data"
        self._output = folder / "output"
        arguments = ("serve", "--port", "0", "--model", "scripted", "--data-dir")
        inherited = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HEADRACE_TEST_BUILD": "1"}
        inherited["HEADRACE_CLUSTER_HOME"] = str(folder / "clusters")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                headrace(*arguments, str(self.data_dir)),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | environment,
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    def wait_until_ready(self) -> openai.OpenAI:
        """A client as the ready block describes it."""
        eventually_blocking(
            lambda: READY in self.said or self.process.poll() is not None, START_LIMIT_S
        )
        assert self.process.poll() is None, self.said
        return self.client()

    def client(self) -> openai.OpenAI:
        """The official client, pointed at it."""
        access = read_env_file(self.data_dir / DEMO_FILE)
        return openai.OpenAI(
            base_url=access["HEADRACE_BASE_URL"], api_key=access["HEADRACE_API_KEY"], max_retries=0
        )

    def stop(self, which: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(which)
        return self.process.wait(60)

    def children(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


@contextmanager
def private_folder() -> Iterator[Path]:
    """Nobody else may list it; root's database user may pass through to what it owns in it."""
    path = Path(tempfile.mkdtemp(prefix="hr-serve-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a serve of the test's own."""
    with private_folder() as path:
        yield path


@pytest.fixture(scope="module")
def running() -> Iterator[Serve]:
    """A serve that the tests of this file share; each leaves it serving."""
    with private_folder() as path:
        serve = Serve(path)
        serve.wait_until_ready().close()
        yield serve
        assert serve.stop() == 0


def say_back(client: openai.OpenAI, text: str) -> str:
    """What the scripted model answers: its prompt, from the start."""
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": text}], stream=True, max_tokens=200
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_first_conversation_needs_only_what_the_ready_block_says(running: Serve) -> None:
    with running.client() as client:
        assert "good morning" in say_back(client, "good morning")

    access = read_env_file(running.data_dir / DEMO_FILE)
    assert access["HEADRACE_BASE_URL"] in running.said
    assert access["HEADRACE_API_KEY"] in running.said
    assert access["HEADRACE_ADMIN_KEY"] not in running.said


def test_the_printed_curl_streams(running: Serve) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    pasted = re.search(r"^curl .*?(?=\n\n)", running.said, re.DOTALL | re.MULTILINE)
    assert pasted is not None

    answer = subprocess.run(
        ["/bin/sh", "-c", f"{pasted.group()} --silent"], capture_output=True, text=True, check=True
    ).stdout

    frames = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert frames[-1] == "[DONE]"
    pieces = [json.loads(frame)["choices"][0]["delta"].get("content") for frame in frames[:-1]]
    assert QUESTION in "".join(piece or "" for piece in pieces)


def test_secrets_lie_in_private_files_and_in_no_log(running: Serve) -> None:
    secrets: list[str] = []
    for name in (DEMO_FILE, SERVERS_FILE, "secrets.env"):
        assert stat.S_IMODE((running.data_dir / name).stat().st_mode) == 0o600
        values = read_env_file(running.data_dir / name)
        secrets += [value for key, value in values.items() if key.endswith(("KEY", "PEPPER"))]
    assert len(set(secrets)) == 3

    logs = [log.read_text(errors="replace") for log in (running.data_dir / "logs").iterdir()]
    assert len(logs) == len(running.children()) == 7
    assert not [secret for secret in secrets if any(secret in log for log in logs)]


def test_a_replica_joins_by_hand_with_what_serve_has_written(running: Serve) -> None:
    script = f'set -a; . {running.data_dir / SERVERS_FILE}; set +a; exec "$@"'
    by_hand = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *headrace("replica")],
        env={},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def replicas() -> list[str]:
        said = subprocess.run(
            headrace("status", "--data-dir", str(running.data_dir)),
            env={},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in said.stdout.splitlines() if "\tv1\tyes\t" in line]

    try:
        eventually_blocking(lambda: len(replicas()) == 2 or by_hand.poll() is not None, 60)
        assert by_hand.poll() is None
    finally:
        by_hand.terminate()
    assert by_hand.wait(30) == 0
    assert len(replicas()) == 1


def test_a_killed_process_comes_back_by_itself(running: Serve) -> None:
    gateway = next(pid for pid in running.children() if b"gateway" in command_line(pid))
    os.kill(gateway, signal.SIGKILL)

    eventually_blocking(lambda: "gateway is back." in running.said, 60)
    with running.client() as client:
        assert "again" in say_back(client, "again")


def test_data_and_keys_survive_a_stop_and_a_kill_of_everything(folder: Path) -> None:
    serve = Serve(folder)
    serve.wait_until_ready().close()
    access = read_env_file(serve.data_dir / DEMO_FILE)
    children = serve.children()
    assert serve.stop(signal.SIGINT) == 0
    assert re.search(r"This may take up to \d+ s\.", serve.said)
    assert "Stopped." in serve.said
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not (serve.data_dir / "run").is_symlink()

    serve = Serve(folder)
    with serve.wait_until_ready() as client:
        assert client.api_key == access["HEADRACE_API_KEY"]
    for pid in (serve.process.pid, *serve.children()):
        # They die with the first of them, if they are quick.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    serve.process.wait(10)

    serve = Serve(folder)
    with serve.wait_until_ready() as client:
        assert client.api_key == access["HEADRACE_API_KEY"]
        assert "still here" in say_back(client, "still here")
    assert serve.stop() == 0
    assert "ended with" not in serve.said


def test_a_signal_while_starting_stops_what_has_started(folder: Path) -> None:
    serve = Serve(folder)
    eventually_blocking(lambda: "PostgreSQL: ready" in serve.said, 60)

    assert serve.stop() == 0
    assert READY not in serve.said


def test_servers_of_ones_own_are_used_in_place_of_embedded_ones(
    folder: Path, servers: Servers, fresh_database_url: str
) -> None:
    serve = Serve(
        folder,
        DATABASE_URL=fresh_database_url,
        REDIS_URL=servers.valkey.url,
        CELERY_BROKER_URL=servers.valkey.broker_url,
    )
    with serve.wait_until_ready() as client:
        assert "elsewhere" in say_back(client, "elsewhere")
    assert not (serve.data_dir / "postgres").exists()
    assert not (serve.data_dir / "valkey").exists()
    assert serve.stop() == 0


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
