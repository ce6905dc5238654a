"""Administration by command: what is changed, what is asked first, and what is on record."""

import os
import pwd
import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
import typer
from typer.testing import CliRunner, Result

from cli.administering import confirm, seconds_of
from cli.errors import CommandFailed
from cli.main import app
from cli.registering import put_in_force
from control.database.connection import connect, connect_async
from control.errors import ServiceError
from control.identity.keys import find_key, hash_key
from control.registry.model_version import ModelVersion
from engine.interface.errors import InvalidRequest

PEPPER = bytes(range(32))


class Command:
    """`headrace` in this process, on a database of the test's own."""

    def __init__(self, database_url: str, data_dir: Path) -> None:
        self.database_url = database_url
        self._environment = {"DATABASE_URL": database_url, "HEADRACE_KEY_PEPPER": PEPPER.hex()}
        self._data_dir = data_dir
        self._runner = CliRunner()

    def try_to(self, *arguments: str) -> Result:
        """Whatever comes of it; nobody is there to be asked."""
        return self._runner.invoke(
            app, [*arguments, "--data-dir", str(self._data_dir)], env=self._environment
        )

    def run(self, *arguments: str) -> str:
        """What it says on standard output, when it works."""
        done = self.try_to(*arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout.strip("\n")

    def table(self, *arguments: str) -> list[dict[str, str]]:
        """The rows of the table that it prints."""
        header, *rows = (line.split("\t") for line in self.run(*arguments).splitlines())
        return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture
def command(fresh_database_url: str, tmp_path: Path) -> Command:
    return Command(fresh_database_url, tmp_path)


def test_a_key_is_rotated_and_both_are_shown(command: Command) -> None:
    command.run("admin", "tenant", "create", "acme")
    command.run("admin", "key", "create", "acme", "--name", "laptop", "--expires-in", "90d")
    (first,) = command.table("admin", "key", "list")
    assert first["name"] == "laptop"
    assert first["expires (UTC)"]
    rotated = command.try_to("admin", "key", "rotate", first["key"], "--grace", "24h")
    assert rotated.exit_code == 0
    assert rotated.stdout.startswith("hr-")
    assert f"{first['key']} works until 20" in rotated.stderr
    old, new = command.table("admin", "key", "list", "--tenant", "acme")
    assert old["replaced by"] == new["key"]
    assert (new["name"], new["expires (UTC)"]) == ("laptop", first["expires (UTC)"])
    assert rotated.stdout.strip() not in str([old, new])


async def test_a_key_that_a_command_made_opens_the_door_until_it_is_suspended(
    command: Command,
) -> None:
    command.run("admin", "tenant", "create", "acme")
    secret = command.run("admin", "key", "create", "acme", "--resume-grace", "30")
    database = connect_async(command.database_url, "test")
    seen = []
    for act in ("suspend", "resume"):
        command.run("admin", "tenant", act, "acme", *(["--yes"] if act == "suspend" else []))
        async with database.connect() as connection:
            found = await find_key(connection, hash_key(PEPPER, secret))
        assert found is not None
        assert found.key.resume_grace_s == 30
        seen.append(found.is_suspended)
    await database.dispose()
    assert seen == [True, False]


def test_what_cannot_be_taken_back_is_not_done_without_a_yes(command: Command) -> None:
    command.run("admin", "tenant", "create", "acme")
    command.run("admin", "key", "create", "acme")
    command.run("admin", "quota", "set", "acme", "*", "--max-concurrent", "3")
    (key,) = command.table("admin", "key", "list")
    destructive = (
        ("admin", "key", "revoke", key["key"]),
        ("admin", "quota", "remove", "acme", "*"),
        ("admin", "tenant", "suspend", "acme"),
    )
    recorded = len(command.table("audit", "list"))
    for arguments in destructive:
        refused = command.try_to(*arguments)
        assert refused.exit_code == 1
        assert "--yes" in str(refused.exception)
    assert len(command.table("audit", "list")) == recorded
    for arguments in destructive:
        command.run(*arguments, "--yes")
    assert len(command.table("audit", "list")) == recorded + len(destructive)


def test_while_a_person_thinks_nothing_is_held(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.run("admin", "tenant", "create", "acme")
    command.run("admin", "key", "create", "acme")
    command.run("admin", "quota", "set", "acme", "*", "--max-concurrent", "3")
    (key,) = command.table("admin", "key", "list")
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headrace admin'"
    asked: list[str] = []

    def think(question: str, is_certain: bool) -> None:
        with psycopg.connect(command.database_url) as connection:
            assert connection.execute(
                f"{sessions} AND state <> 'idle' AND datname = current_database()".encode()
            ).fetchone() == (0,)
        asked.append(question)

    for module in ("admin_keys", "admin_quotas", "admin_tenants"):
        monkeypatch.setattr(f"cli.{module}.confirm", think)
    command.run("admin", "key", "revoke", key["key"])
    command.run("admin", "quota", "remove", "acme", "*")
    command.run("admin", "tenant", "suspend", "acme")
    assert len(asked) == 3


def test_bytes_that_are_no_text_are_told_in_words(command: Command) -> None:
    command.run("admin", "tenant", "create", "acme")
    bad = "\udcff"
    for arguments in (
        ("admin", "tenant", "create", bad),
        ("admin", "tenant", "rename", bad, "x"),
        ("admin", "key", "create", bad),
        ("admin", "key", "create", "acme", "--name", bad),
        ("admin", "key", "create", "acme", "--name", "x" * 201),
        ("admin", "key", "rotate", bad, "--grace", "1h"),
        ("admin", "key", "revoke", bad, "--yes"),
        ("admin", "quota", "set", "acme", bad, "--tokens-per-minute", "1"),
        ("admin", "quota", "remove", "acme", bad, "--yes"),
        ("audit", "list", "--tenant", bad),
        ("audit", "list", "--action", bad),
        ("audit", "list", "--after", bad),
    ):
        refused = command.try_to(*arguments)
        assert refused.exit_code == 1
        assert isinstance(refused.exception, CommandFailed | ServiceError | InvalidRequest), (
            arguments
        )


def test_a_person_is_asked_and_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question: question == "Yes?")
    confirm("Yes?", False)
    with pytest.raises(CommandFailed, match="Nothing was changed"):
        confirm("No?", False)
    confirm("No?", True)


def test_a_quota_is_set_in_place_of_the_one_before_and_lifted(command: Command) -> None:
    command.run("admin", "tenant", "create", "acme")
    command.run("admin", "quota", "set", "acme", "*", "--tokens-per-minute", "1000")
    command.run("admin", "quota", "set", "acme", "*", "--max-concurrent", "4")
    (quota,) = command.table("admin", "quota", "list", "acme")
    assert (quota["model"], quota["tokens/min"], quota["at once"]) == ("*", "", "4")
    empty = command.try_to("admin", "quota", "set", "acme", "*")
    assert empty.exit_code == 2
    unknown = command.try_to("admin", "quota", "set", "acme", "nobody", "--tokens-per-minute", "1")
    assert unknown.exit_code == 1
    assert "no model 'nobody'" in str(unknown.exception)
    command.run("admin", "quota", "remove", "acme", "*", "--yes")
    assert command.table("admin", "quota", "list", "acme") == []


def test_the_record_names_the_person_and_says_what_changed(command: Command) -> None:
    tenant = command.run("admin", "tenant", "create", "acme", "--operator")
    command.run("admin", "tenant", "rename", "acme", "acme & sons")
    renamed, created = command.table("audit", "list")
    person = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    assert renamed["who"] == created["who"] == person
    assert (created["what"], created["object"]) == ("tenant.create", tenant)
    assert renamed["change"] == 'name: "acme" -> "acme & sons"'
    assert "is_operator: null -> true" in created["change"]
    assert command.table("audit", "list", "--action", "tenant.create") == [created]
    page = command.try_to("audit", "list", "--limit", "1")
    assert f"--after {renamed['record']}" in page.stderr
    assert command.table("audit", "list", "--after", renamed["record"]) == [created]
    assert command.try_to("audit", "list", "--after", "x").exit_code == 1
    (operator,) = command.table("admin", "tenant", "list")
    assert operator["role"] == "operator"


def test_a_model_that_is_put_in_force_is_on_record_once(command: Command) -> None:
    first = ModelVersion("m", "v1", "a" * 64, "/weights/v1", 256, 64, datetime.now(UTC), True)
    second = replace(first, version="v2", weights_digest="b" * 64)
    engine = connect(command.database_url, "test", pool_size=1)
    for version in (first, first, second, second):
        with engine.begin() as connection:
            put_in_force(connection, version)
    engine.dispose()
    later, earlier = command.table("audit", "list", "--action", "model.register")
    assert (earlier["object"], later["object"]) == ("m@v1", "m@v2")
    assert 'version: "v1" -> "v2"' in later["change"]
    assert "weights_digest: null" in earlier["change"]


@pytest.mark.parametrize(
    ("said", "meant"), [(None, None), ("0", 0), ("45s", 45), ("30m", 1800), ("90d", 7_776_000)]
)
def test_times_are_said_as_people_say_them(said: str | None, meant: int | None) -> None:
    assert seconds_of(said) == meant


@pytest.mark.parametrize(
    "said", ["", "90", "d", "-1d", "1.5h", "1w", "99999999999d", "4000d", "٣d"]
)
def test_other_times_are_refused(said: str) -> None:
    with pytest.raises(typer.BadParameter, match="90d"):
        seconds_of(said)


def test_a_name_that_cannot_be_one_is_refused(command: Command) -> None:
    for name in ("", "x" * 201, "a\nb", "a\x1b[2J"):
        assert command.try_to("admin", "tenant", "create", name).exit_code == 1
    assert command.table("admin", "tenant", "list") == []
