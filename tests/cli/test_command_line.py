"""What the `headrace` command says when something is not as it must be, and when it is."""

import ast
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli import data_dir as data_dirs
from cli.demo_access import DemoAccess
from cli.listening_address import ListeningAddress, PortTaken
from cli.processes import Fleet, headrace, process_specs
from cli.ready_block import ready_block
from cli.served_model import ModelNotServable, find_model

PROCESSES = ["gateway", "dispatcher", "replica", "batch-worker", "maintenance"]
ACCESS = DemoAccess("http://127.0.0.1:8000/v1", "hr-key", "hr-admin")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        headrace(*arguments),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | environment,
    )


def test_help_names_every_command() -> None:
    said = run("--help")

    assert said.returncode == 0
    for name in [*PROCESSES, "serve", "migrate", "status", "admin", "weights", "bench"]:
        assert name in said.stdout


def test_a_taken_port_is_reported_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run("serve", "--port", str(port), "--data-dir", str(tmp_path / "data"))

    assert said.returncode == 1
    assert f"port {port}" in said.stderr
    assert "--port" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "data").exists()


def test_a_data_folder_in_use_is_reported_and_left_alone(tmp_path: Path) -> None:
    with data_dirs.held(tmp_path):
        before = sorted(tmp_path.iterdir())
        said = run("serve", "--port", "0", "--data-dir", str(tmp_path))
        after = sorted(tmp_path.iterdir())

    assert said.returncode == 1
    assert "in use by another headrace serve" in said.stderr
    assert "Traceback" not in said.stderr
    assert after == before


def test_a_data_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = run("serve", "--port", "0", "--data-dir", str(tmp_path / "file" / "data"))

    assert said.returncode == 1
    assert str(tmp_path / "file" / "data") in said.stderr
    assert "Traceback" not in said.stderr


def test_servers_of_ones_own_that_do_not_answer_are_reported_without_their_password(
    tmp_path: Path,
) -> None:
    said = run(
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
        DATABASE_URL="postgresql://headrace:hunter2@127.0.0.1:1/headrace",
        REDIS_URL="redis://:hunter2@127.0.0.1:1/0",
    )

    assert said.returncode == 1
    assert "does not answer" in said.stderr
    assert "hunter2" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    "arguments",
    [("admin", "tenant", "list"), ("admin", "key", "list"), ("status",), ("migrate",)],
    ids=" ".join,
)
def test_a_command_without_a_database_says_how_to_name_one(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = run(*arguments, "--data-dir", str(tmp_path))

    assert said.returncode == 1
    assert "DATABASE_URL" in said.stderr
    assert "Traceback" not in said.stderr


def test_port_zero_chooses_a_free_port_and_any_host_is_reached_on_loopback() -> None:
    address = ListeningAddress.claim("0.0.0.0", 0)

    assert address.port > 0
    assert address.origin == f"http://127.0.0.1:{address.port}"
    with pytest.raises(PortTaken, match="no-such-host"):
        ListeningAddress.claim("no-such-host.invalid", 80)


def test_the_ready_blocks_curl_is_one_command_with_a_streaming_body() -> None:
    block = ready_block(ACCESS, "some-model", "demo.env")
    start = block.index("curl -N")
    words = shlex.split(block[start : block.index("In Python")])

    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer hr-key" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "some-model"
    assert body["stream"] is True


def test_the_ready_blocks_python_is_a_program_and_nobody_sees_the_admin_key() -> None:
    block = ready_block(ACCESS, "some-model", "demo.env")

    program = ast.parse(block[block.index("from openai") :])
    assert isinstance(program.body[0], ast.ImportFrom)
    assert "hr-admin" not in block


def test_replicas_start_before_the_gateway_and_every_process_has_a_command() -> None:
    fleet = Fleet("some-model", 2, ListeningAddress("127.0.0.1", 8000))
    specs = process_specs({}, "redis://127.0.0.1:1", fleet)

    assert [spec.name for spec in specs] == [
        "dispatcher",
        "replica-1",
        "replica-2",
        "gateway",
        "batch-worker",
        "maintenance",
    ]
    assert {spec.argv[-1] for spec in specs} == set(PROCESSES)
    assert {spec.argv[0] for spec in specs} == {sys.executable}


async def test_the_scripted_model_is_for_test_builds_only(tmp_path: Path) -> None:
    with pytest.raises(ModelNotServable, match="HEADRACE_TEST_BUILD"):
        await find_model("scripted", tmp_path, is_test_build=False, progress=print)

    model = await find_model("scripted", tmp_path, is_test_build=True, progress=print)
    assert model.pinned_name == "scripted@v1"


async def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotServable, match=str(tmp_path)):
        await find_model(str(tmp_path), tmp_path, is_test_build=False, progress=print)
