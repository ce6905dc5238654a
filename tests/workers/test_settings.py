"""A worker that cannot start says why in words, names variables and shows no values."""

import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from control.starting import BadSettings, read_settings
from workers.batch_settings import BatchWorkerSettings
from workers.settings import (
    DispatcherSettings,
    MaintenanceSettings,
    ReplicaSettings,
    StoreSettings,
)

STORES = {"DATABASE_URL", "REDIS_URL"}
NEEDED = {
    DispatcherSettings: STORES,
    ReplicaSettings: STORES | {"HEADRACE_MODEL", "HEADRACE_DATA_DIR"},
    BatchWorkerSettings: STORES | {"CELERY_BROKER_URL", "HEADRACE_DATA_DIR"},
    MaintenanceSettings: STORES | {"CELERY_BROKER_URL", "HEADRACE_DATA_DIR"},
}
WORKERS = {
    "dispatcher": "The dispatcher",
    "replica": "The replica",
    "batch-worker": "The batch worker",
    "maintenance": "The maintenance process",
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {variable for needed in NEEDED.values() for variable in needed}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("settings", NEEDED, ids=lambda each: each.__name__)
def test_every_missing_variable_has_a_line(settings: type[StoreSettings]) -> None:
    with pytest.raises(BadSettings) as refusal:
        read_settings(settings)
    lines = str(refusal.value).splitlines()
    assert set(lines) == {f"{name}: Field required" for name in NEEDED[settings]}


def test_an_empty_variable_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    monkeypatch.setenv("REDIS_URL", "redis://cache")
    with pytest.raises(BadSettings, match=r"^DATABASE_URL: Field required$"):
        read_settings(DispatcherSettings)


def test_a_bad_value_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "hunter2")
    monkeypatch.setenv("REDIS_URL", "redis://:hunter3/4@cache")
    monkeypatch.setenv("HEADRACE_MODEL", "some-model")
    monkeypatch.setenv("HEADRACE_DATA_DIR", "/nonexistent")
    monkeypatch.setenv("HEADRACE_DTYPE", "float61")
    with pytest.raises(BadSettings) as refusal:
        read_settings(ReplicaSettings)
    said = str(refusal.value)
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "DATABASE_URL",
        "REDIS_URL",
        "HEADRACE_DTYPE",
    ]
    assert "hunter" not in said
    assert "float61" not in said
    assert "Value error" not in said


def start(worker: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", worker],
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_without_settings_says_so_and_ends(worker: str) -> None:
    ended = start(worker)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{WORKERS[worker]} does not start.\nDATABASE_URL: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_whose_servers_are_away_says_which(worker: str) -> None:
    ended = start(
        worker,
        DATABASE_URL="postgresql://u:hunter2@127.0.0.1:1/x",
        REDIS_URL="redis://:hunter2@127.0.0.1:1",
        CELERY_BROKER_URL="redis://:hunter2@127.0.0.1:1",
        HEADRACE_MODEL="some-model",
        HEADRACE_DATA_DIR="/nonexistent",
    )

    assert ended.returncode == 1
    assert f"{WORKERS[worker]} does not start.\nThe server at REDIS_URL cannot be asked" in (
        ended.stderr
    )
    assert "Traceback" not in ended.stderr
    assert "hunter2" not in ended.stderr


def test_a_replica_whose_database_is_away_says_so(redis_url: str) -> None:
    ended = start(
        "replica",
        DATABASE_URL="postgresql://u:hunter2@127.0.0.1:1/x",
        REDIS_URL=redis_url,
        HEADRACE_MODEL="some-model",
        HEADRACE_DATA_DIR="/nonexistent",
    )

    assert ended.returncode == 1
    assert "The database at DATABASE_URL cannot be asked: connection failed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hunter2" not in ended.stderr


def test_a_replica_whose_database_has_no_tables_says_how_to_make_them(
    redis_url: str, database_url: str
) -> None:
    empty = urlsplit(database_url)._replace(path="/postgres").geturl()
    ended = start(
        "replica",
        DATABASE_URL=empty,
        REDIS_URL=redis_url,
        HEADRACE_MODEL="some-model",
        HEADRACE_DATA_DIR="/nonexistent",
    )

    assert ended.returncode == 1
    assert "headrace migrate" in ended.stderr
    assert "Traceback" not in ended.stderr
