"""The batch tier for tests: a tenant with files and batches, and real batch workers."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from control.batches.batch import Batch, JsonValue, mint_batch_id
from control.batches.doorbell import Doorbell
from control.batches.store import NewBatch, create_batch, find_batch
from control.files.files import NewFile, insert_file, mint_file_id
from control.files.store import LocalFileStore

Line = dict[str, object]
TERMINAL = {"failed", "completed", "expired", "cancelled"}


@dataclass(slots=True)
class BatchTier:
    """What a tenant does through the API, without HTTP."""

    database: AsyncEngine
    store: LocalFileStore
    tenant_id: str
    doorbell: Doorbell

    async def upload(self, content: bytes) -> str:
        """A stored input file's id."""
        file_id = mint_file_id(time.time(), secrets.randbits(98))

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        num_bytes = await self.store.write(file_id, chunks())
        async with self.database.begin() as connection:
            new = NewFile(file_id, self.tenant_id, "batch", "input.jsonl", num_bytes)
            await insert_file(connection, new)
        return file_id

    async def create(
        self,
        content: bytes,
        *,
        endpoint: str = "/v1/completions",
        window: str = "24h",
        ring: bool = True,
    ) -> str:
        """A new batch's id."""
        file_id = await self.upload(content)
        batch_id = mint_batch_id(time.time(), secrets.randbits(98))
        new = NewBatch(batch_id, self.tenant_id, "key", endpoint, window, file_id, {})
        async with self.database.begin() as connection:
            await create_batch(connection, new)
        if ring:
            assert self.doorbell.ring(batch_id)
        return batch_id

    async def show(self, batch_id: str) -> Batch:
        """The batch now."""
        async with self.database.connect() as connection:
            return await find_batch(connection, self.tenant_id, batch_id)

    async def read_lines(self, file_id: str | None) -> list[dict[str, JsonValue]]:
        """The lines of a result file; none if there is no file."""
        if file_id is None:
            return []
        content = b"".join([chunk async for chunk in self.store.read(file_id)])
        assert content.endswith(b"\n")
        return [json.loads(line) for line in content.splitlines()]


def jsonl(lines: Sequence[Line]) -> bytes:
    """The lines as a file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def completion(custom_id: str, model: str, prompt: str, **body: object) -> Line:
    """A line that asks for a completion, which will be the prompt."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, **body},
    }


def worker_environment(
    database_url: str, redis_url: str, broker_url: str, data_dir: Path, **more: str
) -> dict[str, str]:
    """What a batch worker process is given."""
    return {
        **os.environ,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "CELERY_BROKER_URL": broker_url,
        "HEADRACE_DATA_DIR": str(data_dir),
        "HEADRACE_BATCH_DRAIN_S": "3",
        **more,
    }


@contextmanager
def batch_worker(environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A real worker process; killed with its children at the end if it still lives."""
    command = [sys.executable, "-P", "-m", "cli.main", "batch-worker"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """As when a node vanishes: the process and its children, at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
