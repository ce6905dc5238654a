"""Looks for a word wherever a running service could have left it."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis

from cli.env_file import read_env_file
from cli.settings import BROKER_URL, REDIS_URL, SERVERS_FILE
from control.streams.connection import connect
from tests.end_to_end.live_service import LiveService


@dataclass(frozen=True, slots=True)
class Traces:
    """Where one word is found. Each method names the places."""

    service: LiveService
    word: str

    def in_files(self) -> set[str]:
        """Files of the data folder, logs among them; not those that users uploaded."""
        found = set()
        for path in self.service.data_dir.rglob("*"):
            name = str(path.relative_to(self.service.data_dir))
            is_ours = path.is_file() and not name.startswith(("files/", "weights/"))
            if is_ours and self._holds(path.read_bytes()):
                found.add(name)
        return found

    def in_tables(self) -> set[str]:
        """Tables with the word in any column, as text or as bytes."""
        tables = self.service.sql(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace "
            "AND relkind IN ('r', 'p') AND NOT relispartition"
        )
        found = set()
        for (table,) in cast("list[tuple[str]]", tables):
            ((count,),) = self.service.sql(
                f'SELECT count(*) FROM "{table}" AS each '
                "WHERE strpos(each::text, %s) > 0 OR strpos(each::text, %s) > 0",
                self.word,
                self.word.encode().hex(),
            )
            if count:
                found.add(table)
        return found

    def in_statements(self) -> list[str]:
        """What PostgreSQL shows of what its sessions did last."""
        shown = self.service.sql("SELECT query FROM pg_stat_activity WHERE query IS NOT NULL")
        return [query for (query,) in cast("list[tuple[str]]", shown) if self.word in query]

    def in_redis(self) -> set[str]:
        """Keys with the word in name or value, in the transport and in Celery's broker."""
        urls = read_env_file(self.service.data_dir / SERVERS_FILE)
        found = set()
        broker = urls[BROKER_URL].replace("redis+socket:", "unix:").replace("virtual_host", "db")
        for url in (urls[REDIS_URL], broker):
            with connect(url) as client:
                for key in cast("list[bytes]", client.keys("*")):
                    if self._holds(key):
                        found.add(f"the name {key!r}")
                    if any(self._holds(part) for part in _parts(client, key.decode())):
                        found.add(key.decode())
        return found

    def in_command_lines(self) -> set[str]:
        """Processes of this machine that were given the word as an argument."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self._holds(path.read_bytes()):
                    found.add(str(path))
            except OSError:
                continue  # It has ended meanwhile.
        return found

    def _holds(self, data: bytes) -> bool:
        return self.word.encode() in data


def _parts(client: redis.Redis, key: str) -> list[bytes]:
    """All that a value is made of, whatever its type; of a Celery message its body, too."""
    found: Any
    match client.type(key):
        case b"string":
            found = [client.get(key)]
        case b"hash":
            found = [part for pair in client.hgetall(key).items() for part in pair]
        case b"list":
            found = client.lrange(key, 0, -1)
        case b"set":
            found = list(client.smembers(key))
        case b"zset":
            found = client.zrange(key, 0, -1)
        case b"stream":
            entries: Any = client.xrange(key)
            found = [part for _, fields in entries for pair in fields.items() for part in pair]
        case _:
            found = []  # It has expired meanwhile.
    parts = [part for part in cast("list[bytes | None]", found) if part is not None]
    return parts + [_celery_body(part) for part in parts]


def _celery_body(message: bytes) -> bytes:
    """The arguments of a task, which are written in base 64."""
    try:
        return base64.b64decode(json.loads(message)["body"])
    except (ValueError, KeyError, TypeError):
        return b""
