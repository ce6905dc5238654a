"""The gateway as a process: what it refuses to start with, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.settings import read_settings
from control.starting import BadSettings
from tests.api.conftest import Served
from tests.api.live_gateway import PEPPER
from tests.api.raw_http import connected, read_answer, read_to_the_end, read_until, request
from tests.api.scripted_replica import ScriptedReplica, talk_until_cancelled

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("pepper", [None, "", "00" * 31, "not hexadecimal" * 8])
def test_without_a_proper_pepper_there_are_no_settings(
    monkeypatch: pytest.MonkeyPatch, pepper: str | None
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:hunter2@db/x")
    monkeypatch.setenv("REDIS_URL", "redis://localhost")
    if pepper is None:
        monkeypatch.delenv("HEADRACE_KEY_PEPPER", raising=False)
    else:
        monkeypatch.setenv("HEADRACE_KEY_PEPPER", pepper)
    with pytest.raises(BadSettings, match="HEADRACE_KEY_PEPPER: ") as caught:
        read_settings()
    assert "hunter2" not in str(caught.value)
    assert not pepper or pepper not in str(caught.value)


def test_every_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("REDIS_URL", "redis://localhost")
    monkeypatch.setenv("HEADRACE_KEY_PEPPER", PEPPER.hex())
    monkeypatch.setenv("HEADRACE_PORT", "99999")
    with pytest.raises(BadSettings) as caught:
        read_settings()
    lines = str(caught.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {"DATABASE_URL", "HEADRACE_PORT"}


def test_settings_do_not_print_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:hunter2@db/x")
    monkeypatch.setenv("REDIS_URL", "redis://:hunter3@redis")
    monkeypatch.setenv("HEADRACE_KEY_PEPPER", PEPPER.hex())
    shown = repr(read_settings())
    for secret in ("hunter2", "hunter3", PEPPER.hex()):
        assert secret not in shown


def test_a_process_without_settings_says_so_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "api.main"],
        cwd=_ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "HEADRACE_KEY_PEPPER: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_redis_that_is_open_to_the_world_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "api.main"],
        cwd=_ROOT,
        env={
            "PATH": os.environ["PATH"],
            "DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
            "REDIS_URL": "redis://198.51.100.1:6379",
            "HEADRACE_KEY_PEPPER": PEPPER.hex(),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "without a password" in ended.stderr


@pytest.fixture
def process(
    served: Served, database_url: str, redis_url: str
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A gateway process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    environment = os.environ | {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "HEADRACE_KEY_PEPPER": PEPPER.hex(),
        "HEADRACE_PORT": str(port),
        "HEADRACE_GATEWAY_DRAIN_S": "0.5",
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "api.main"],
        cwd=_ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stderr is not None
        for line in started.stderr:
            if "running on" in line:
                break
        yield started, port
    finally:
        started.kill()
        started.communicate()


def test_signals_end_a_process_in_order_and_with_status_zero(
    process: tuple["subprocess.Popen[str]", int], served: Served, replica: ScriptedReplica
) -> None:
    running, port = process
    replica.script = talk_until_cancelled
    headers = {"Authorization": f"Bearer {served.key}"}
    body = json.dumps({"model": served.model, "prompt": "secret words", "stream": True}).encode()
    with connected(port) as idle, connected(port) as streaming:
        idle.sendall(request("/v1/models?secret=1", method="GET", headers=headers))
        assert read_answer(idle)[0] == 200
        streaming.sendall(request("/v1/completions", headers=headers, body=body))
        read_until(streaming, b"word")
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGTERM)
        assert read_to_the_end(idle) == b""
        running.send_signal(signal.SIGTERM)
        events = read_to_the_end(streaming)
    assert b'"code":"server_restarting"' in events
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    _, log = running.communicate(timeout=20)
    assert running.returncode == 0
    assert "secret" not in log
    assert served.key not in log
    assert "Traceback" not in log


def test_a_redis_that_does_not_answer_is_named() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "api.main"],
        cwd=_ROOT,
        env={
            "PATH": os.environ["PATH"],
            "DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
            "REDIS_URL": "redis://127.0.0.1:1",
            "HEADRACE_KEY_PEPPER": PEPPER.hex(),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "REDIS_URL cannot be asked" in ended.stderr
    assert "Traceback" not in ended.stderr
