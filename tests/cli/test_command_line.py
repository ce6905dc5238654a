"""What the `headrace` command says when something is not as it must be, and when it is."""

import ast
import errno
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic_settings import BaseSettings

from api.settings import GatewaySettings
from cli import data_dir as data_dirs
from cli.demo_access import DemoAccess
from cli.listening_address import CannotListen, ListeningAddress
from cli.processes import Fleet, headrace, process_specs
from cli.ready_block import QUESTION, TEMPERATURE, ready_block
from cli.served_model import ModelNotServable, find_model
from workers.batch_settings import BatchWorkerSettings
from workers.settings import DispatcherSettings, MaintenanceSettings, ReplicaSettings

PROCESSES = ["gateway", "dispatcher", "replica", "batch-worker", "maintenance"]
DATA_DIR = Path("/data")
SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "dispatcher": DispatcherSettings,
    "replica": ReplicaSettings,
    "batch-worker": BatchWorkerSettings,
    "maintenance": MaintenanceSettings,
}
ACCESS = DemoAccess("http://127.0.0.1:8000/v1", "hr-key", "hr-admin")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        headrace(*arguments),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | environment,
    )


def prefix(settings: type[BaseSettings]) -> str:
    return settings.model_config.get("env_prefix", "")


def test_help_names_every_command() -> None:
    said = run("--help")

    assert said.returncode == 0
    for name in [*PROCESSES, "serve", "migrate", "status", "admin", "audit", "weights", "bench"]:
        assert name in said.stdout


def test_every_command_looks_into_the_same_folder_and_says_so() -> None:
    for command in (
        ("serve",),
        ("status",),
        ("migrate",),
        ("admin", "tenant", "create"),
        ("admin", "tenant", "list"),
        ("admin", "tenant", "rename"),
        ("admin", "tenant", "suspend"),
        ("admin", "tenant", "resume"),
        ("admin", "key", "create"),
        ("admin", "key", "list"),
        ("admin", "key", "rotate"),
        ("admin", "key", "revoke"),
        ("admin", "quota", "set"),
        ("admin", "quota", "list"),
        ("admin", "quota", "remove"),
        ("audit", "list"),
        ("weights", "fetch"),
        ("weights", "register"),
    ):
        said = run(*command, "--help", COLUMNS="200")
        option = said.stdout[said.stdout.index("--data-dir") :].splitlines()[0]
        assert "[default: .headrace]" in option, command


@pytest.mark.parametrize("process", PROCESSES)
def test_the_help_of_a_process_names_every_variable_that_it_needs(process: str) -> None:
    needed = {
        variable
        for name, field in SETTINGS[process].model_fields.items()
        if field.is_required()
        for variable in [str(field.validation_alias or prefix(SETTINGS[process]) + name).upper()]
    }
    said = " ".join(run(process, "--help", COLUMNS="500").stdout.split())

    needs = said[said.index("Needs ") :].partition(";")[0]
    assert {variable for variable in needed if variable not in needs} == set()
    assert "serve.env" in said


def test_a_taken_port_is_reported_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run("serve", "--port", str(port), "--data-dir", str(tmp_path / "data"))

    assert said.returncode == 1
    assert f"port {port}" in said.stderr
    assert "--port" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "data").exists()


def test_an_address_of_another_machine_gets_the_advice_for_addresses() -> None:
    with pytest.raises(CannotListen, match=r"no address of this machine.*--host") as refusal:
        ListeningAddress.claim("198.51.100.1", 8000)
    assert "--port" not in str(refusal.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "it is taken.*another port with --port"),
        (errno.EACCES, "1024 or more with --port"),
        (errno.EAFNOSUPPORT, "another address with --host and --port"),
    ],
)
def test_every_reason_for_not_listening_has_its_own_advice(
    monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(CannotListen, match=advice):
        ListeningAddress.claim("127.0.0.1", 80)


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
    assert "is a file, not a folder" in said.stderr
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
    assert "REDIS_URL cannot be asked" in said.stderr
    assert said.stderr.count("\n") == 1
    assert "hunter2" not in said.stdout + said.stderr


COMMANDS = [("admin", "tenant", "list"), ("admin", "key", "list"), ("status",), ("migrate",)]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_database_that_is_away_is_one_line_without_its_password(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = run(
        *arguments,
        "--data-dir",
        str(tmp_path),
        DATABASE_URL="postgresql://headrace:hunter2@127.0.0.1:1/headrace",
        REDIS_URL="redis://:hunter2@127.0.0.1:1/0",
    )

    assert said.returncode == 1
    assert said.stderr.startswith("headrace: The database at DATABASE_URL cannot be asked: ")
    assert said.stderr.count("\n") == 1
    assert "hunter2" not in said.stderr


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL"])
def test_nonsense_in_place_of_a_url_is_one_line_before_anything_is_started(
    tmp_path: Path, name: str
) -> None:
    said = run("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), **{name: "nonsense"})

    assert said.returncode == 1
    assert said.stderr.startswith(f"headrace: {name}: it must ")
    assert said.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_nonsense_in_place_of_the_databases_url_is_one_line_from_every_command(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = run(*arguments, "--data-dir", str(tmp_path), DATABASE_URL="nonsense")

    assert said.returncode == 1
    assert said.stderr.startswith("headrace: DATABASE_URL: it must look like postgresql://")
    assert said.stderr.count("\n") == 1


def test_a_database_without_our_tables_is_called_that(tmp_path: Path, database_url: str) -> None:
    empty = urlsplit(database_url)._replace(path="/postgres").geturl()
    said = run("admin", "tenant", "list", "--data-dir", str(tmp_path), DATABASE_URL=empty)

    assert said.returncode == 1
    assert "headrace migrate" in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_revision_that_there_is_not_is_one_line(tmp_path: Path, database_url: str) -> None:
    said = run(
        "migrate", "--revision", "zzzz", "--data-dir", str(tmp_path), DATABASE_URL=database_url
    )

    assert said.returncode == 1
    assert "zzzz" in said.stderr
    assert said.stderr.count("\n") == 1


def test_status_has_a_header_for_programs_too(
    tmp_path: Path, database_url: str, redis_url: str
) -> None:
    said = run(
        "status", "--data-dir", str(tmp_path), DATABASE_URL=database_url, REDIS_URL=redis_url
    )

    assert said.returncode == 0
    assert said.stdout.splitlines()[0].split("\t")[:2] == ["replica", "version"]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_without_a_database_says_how_to_name_one(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = run(*arguments, "--data-dir", str(tmp_path))

    assert said.returncode == 1
    assert f"No `headrace serve` is running on {tmp_path} now" in said.stderr
    assert "DATABASE_URL" in said.stderr
    assert "Traceback" not in said.stderr


def test_port_zero_chooses_a_free_port_and_any_host_is_reached_on_loopback() -> None:
    address = ListeningAddress.claim("0.0.0.0", 0)

    assert address.port > 0
    assert address.origin == f"http://127.0.0.1:{address.port}"
    with pytest.raises(CannotListen, match="no-such-host"):
        ListeningAddress.claim("no-such-host.invalid", 80)


def test_the_ready_blocks_curl_is_one_command_with_a_streaming_body() -> None:
    block = ready_block(ACCESS, "some-model", DATA_DIR)
    start = block.index("curl -N")
    words = shlex.split(block[start : block.index("In Python")])

    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer hr-key" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "some-model"
    assert body["stream"] is True
    assert body["temperature"] == TEMPERATURE
    assert body["messages"] == [{"role": "user", "content": QUESTION}]


def test_the_ready_blocks_python_is_a_program_and_nobody_sees_the_admin_key() -> None:
    block = ready_block(ACCESS, "some-model", DATA_DIR)

    program = ast.parse(block[block.index("from openai") :])
    assert isinstance(program.body[0], ast.ImportFrom)
    assert "hr-admin" not in block
    call = next(
        node
        for node in ast.walk(program)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".create")
    )
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert given == {
        "model": "some-model",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": TEMPERATURE,
        "stream": True,
    }


def test_the_ready_blocks_status_command_works_when_pasted_anywhere(tmp_path: Path) -> None:
    data_dir = tmp_path / "it's here"
    block = ready_block(ACCESS, "some-model", data_dir)
    pasted = next(line for line in block.splitlines() if "Replicas" in line).split(None, 1)[1]

    said = subprocess.run(
        ["/bin/sh", "-c", pasted], cwd="/", env={}, capture_output=True, text=True, check=False
    )

    assert said.stderr.startswith(f"headrace: No `headrace serve` is running on {data_dir} now")


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
