"""The folder that one serve owns, and the files in it that only their owner may read."""

import stat
import subprocess
from pathlib import Path

import pytest

from cli import data_dir as data_dirs
from cli.data_dir import DataDirInUse, DataDirUnusable
from cli.env_file import read_env_file, write_env_file
from cli.running_serve import setting
from cli.settings import (
    BROKER_URL,
    DATABASE_URL,
    KEY_PEPPER,
    REDIS_URL,
    SERVERS_FILE,
    Servers,
    ServeSettings,
    SettingMissing,
    broker_beside,
    child_environment,
    pepper_bytes,
    service_environment,
)


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with data_dirs.held(tmp_path / "data"):
        again = data_dirs.held(tmp_path / "data")
        with pytest.raises(DataDirInUse, match=r"in use by another headrace serve \(process \d+\)"):
            again.__enter__()
    with data_dirs.held(tmp_path / "data"):
        pass


def test_a_new_data_folder_is_private_and_an_existing_one_is_left_as_it_is(tmp_path: Path) -> None:
    existing = tmp_path / "existing"
    existing.mkdir()
    existing.chmod(0o755)

    with data_dirs.held(tmp_path / "new"), data_dirs.held(existing):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        assert stat.S_IMODE(existing.stat().st_mode) == 0o755


def test_the_pepper_is_minted_once_and_is_32_bytes_that_only_we_can_read(tmp_path: Path) -> None:
    pepper = data_dirs.key_pepper(tmp_path)

    assert len(bytes.fromhex(pepper)) == 32
    assert data_dirs.key_pepper(tmp_path) == pepper
    assert stat.S_IMODE((tmp_path / "secrets.env").stat().st_mode) == 0o600


def test_an_env_file_is_replaced_whole_and_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "some.env"
    path.write_text("OLD=1\n")
    path.chmod(0o644)

    write_env_file(path, {"NEW": "2"})

    assert read_env_file(path) == {"NEW": "2"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["some.env"]


def test_a_shell_reads_the_same_values_as_we_do(tmp_path: Path) -> None:
    values = {"A": "x?y=1&z=2", "B": "it's $HOME", "C": "", "D": "a=b #c"}
    path = tmp_path / "some.env"
    write_env_file(path, values)

    assert read_env_file(path) == values
    script = f'. {path}; printf "%s\\n" "$A" "$B" "$C" "$D"'
    shell = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == list(values.values())


def test_a_setting_comes_from_the_environment_before_the_running_serves_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, given = "11" * 32, "22" * 32
    monkeypatch.delenv(KEY_PEPPER, raising=False)
    with data_dirs.held(tmp_path):
        write_env_file(tmp_path / SERVERS_FILE, {KEY_PEPPER: written})
        assert setting(KEY_PEPPER, tmp_path) == written

        monkeypatch.setenv(KEY_PEPPER, given)
        assert setting(KEY_PEPPER, tmp_path) == given


def test_a_missing_setting_is_named_with_the_ways_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)

    with pytest.raises(SettingMissing, match=r"is running on .* now.*--data-dir.*DATABASE_URL"):
        setting("DATABASE_URL", tmp_path)


def test_what_a_killed_serve_left_behind_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with data_dirs.held(tmp_path):
        write_env_file(tmp_path / SERVERS_FILE, {"DATABASE_URL": "postgresql:///x"})

    with pytest.raises(SettingMissing, match=r"No `headrace serve` is running on .* now"):
        setting("DATABASE_URL", tmp_path)


def test_a_serve_that_has_not_written_its_file_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with (
        data_dirs.held(tmp_path),
        pytest.raises(SettingMissing, match="is starting or stopping"),
    ):
        setting("DATABASE_URL", tmp_path)


def test_asking_whether_a_folder_is_in_use_does_not_use_it(tmp_path: Path) -> None:
    assert not data_dirs.is_in_use(tmp_path)
    with data_dirs.held(tmp_path):
        assert data_dirs.is_in_use(tmp_path)
    assert not data_dirs.is_in_use(tmp_path)
    with data_dirs.held(tmp_path):
        pass


@pytest.mark.parametrize("below", [(), ("data",), ("some", "data")])
def test_a_file_is_no_data_folder_and_nothing_below_it_is(
    tmp_path: Path, below: tuple[str, ...]
) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(DataDirUnusable, match="is a file, not a folder") as refusal:
        data_dirs.held(file.joinpath(*below)).__enter__()
    assert str(file) in str(refusal.value)
    assert "Errno" not in str(refusal.value)
    with pytest.raises(DataDirUnusable, match="is a file, not a folder"):
        data_dirs.is_in_use(file.joinpath(*below))


@pytest.mark.parametrize("name", [DATABASE_URL, REDIS_URL, BROKER_URL, KEY_PEPPER])
def test_an_unusable_variable_stops_serve_and_every_other_command_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "scheme://u:hunter2@host")

    for refused in (ServeSettings.from_environment, lambda: setting(name, tmp_path)):
        with pytest.raises(SettingMissing, match=f"^{name}: it must ") as refusal:
            refused()
        assert "hunter2" not in str(refusal.value)


def test_the_processes_get_our_settings_and_nothing_of_a_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_KV_TOKENS", "4096")
    monkeypatch.setenv("HEADRACE_MODEL", "from outside")
    monkeypatch.setenv("HEADRACE_API_KEY", "hr-key")
    servers = Servers("postgresql:///x", "redis://r", "redis://r/1", "11" * 32)

    service = service_environment(servers, {"HEADRACE_MODEL": "some@v1"})

    assert service["HEADRACE_KV_TOKENS"] == "4096"
    assert service["HEADRACE_MODEL"] == "some@v1"
    assert service["DATABASE_URL"] == "postgresql:///x"
    assert not {"HEADRACE_API_KEY", "PATH"} & service.keys()
    assert {"PATH", *service} <= child_environment(service).keys()


@pytest.mark.parametrize("pepper", ["", "abc", "ab" * 31, "zz" * 32])
def test_a_pepper_that_is_none_is_refused_without_being_shown(pepper: str) -> None:
    with pytest.raises(SettingMissing, match=KEY_PEPPER) as refusal:
        pepper_bytes(pepper)
    assert not pepper or pepper not in str(refusal.value)


@pytest.mark.parametrize(
    ("redis_url", "broker_url"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/1"),
        ("redis://:secret@cache:6379", "redis://:secret@cache:6379/1"),
        (
            "rediss://u:p@cache:6380/0?ssl_cert_reqs=required",
            "rediss://u:p@cache:6380/1?ssl_cert_reqs=required",
        ),
        ("unix:///run/valkey.sock?db=0", "redis+socket:///run/valkey.sock?virtual_host=1"),
    ],
)
def test_the_broker_is_database_one_of_the_same_server(redis_url: str, broker_url: str) -> None:
    assert broker_beside(redis_url) == broker_url
