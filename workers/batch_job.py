"""Carries one batch for one slice of time: as far as it comes, then the doorbell rings again.

Everything that must outlive the slice is in PostgreSQL. A slice that ends, is drained or is
killed leaves lines behind, leased or given back, and requests that go on; the next slice, here
or elsewhere, claims the lines again and follows those requests.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from control.batches.batch import BatchStatus
from control.batches.lifecycle import (
    OpenBatch,
    accept_input,
    begin_finalizing,
    end_batch,
    read_open,
    refuse_input,
)
from control.batches.result_lines import ConservationBroken, Ending, result_lines
from control.batches.validation import LineFault, Verdict, check_input, read_lines
from control.files.files import NewFile, mint_file_id
from control.files.store import FileStore, ObjectNotFound
from control.identity.request_id import NUM_RANDOM_BITS
from control.registry.store import load_registry_async
from workers.batch_item import ItemCarrier, Means
from workers.batch_window import ItemWindow

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Slice:
    """How much is done: until the monotonic second `ends_at`, or until `stop` is set."""

    ends_at: float
    stop: asyncio.Event

    @property
    def is_over(self) -> bool:
        """True once nothing new may be begun."""
        return self.stop.is_set() or time.monotonic() >= self.ends_at


class BatchJob:
    """One batch in the hands of one worker; at most `window` of its requests at once."""

    def __init__(self, means: Means, store: FileStore, batch_id: str, window: int) -> None:
        self._means = means
        self._store = store
        self._batch_id = batch_id
        self._window = window

    async def run(self, part: Slice) -> bool:
        """Carry the batch on until the slice is over. True if there is more to do now."""
        while not part.is_over:
            async with self._means.database.connect() as connection:
                batch = await read_open(connection, self._batch_id)
            if batch is None or batch.is_paused:
                return False
            if batch.status is BatchStatus.VALIDATING:
                await self._validate(batch)
            elif batch.status is BatchStatus.FINALIZING:
                await self._finalize(batch)
            elif await self._work(batch, part):
                await self._wind_up(batch)
        return True

    async def _validate(self, batch: OpenBatch) -> None:
        """Read the file twice: once to say what is wrong with it, once to make the items."""
        verdict = await self._check_input(batch)
        async with self._means.database.begin() as connection:
            if verdict.model is None:
                await refuse_input(connection, batch.batch_id, verdict.faults)
            else:
                lines = read_lines(self._store.read(batch.input_file_id), batch.endpoint)
                await accept_input(connection, batch.batch_id, verdict.model, lines)

    async def _check_input(self, batch: OpenBatch) -> Verdict:
        async with self._means.database.connect() as connection:
            registry = await load_registry_async(connection)
        try:
            chunks = self._store.read(batch.input_file_id)
            return await check_input(chunks, batch.endpoint, registry)
        except ObjectNotFound:
            fault = LineFault("not_found", "The input file is gone.", "input_file_id")
            return Verdict((fault,), None)

    async def _work(self, batch: OpenBatch, part: Slice) -> bool:
        """Carry items. True once every line has a result."""
        if not batch.total:
            return True
        async with self._means.database.connect() as connection:
            version = (await load_registry_async(connection)).resolve(batch.model or "")
        assert version is not None, "versions are never taken out of the registry"
        carrier = ItemCarrier(self._means, batch, version)
        window = ItemWindow(self._means.database, carrier, batch, self._window)
        return await window.work(part.stop, part.ends_at)

    async def _wind_up(self, batch: OpenBatch) -> None:
        if batch.status is BatchStatus.CANCELLING:
            await self._finalize(batch)
            return
        async with self._means.database.begin() as connection:
            await begin_finalizing(connection, batch.batch_id)

    async def _finalize(self, batch: OpenBatch) -> None:
        """Write both files, then end the batch with them, unless somebody else just did."""
        output, num_completed = await self._write(batch, "completed")
        errors, num_failed = await self._write(batch, "failed")
        is_ended = False
        try:
            if num_completed + num_failed != batch.total:
                raise ConservationBroken(
                    f"{batch.batch_id} has {batch.total} items, but {num_completed} completed "
                    f"and {num_failed} failed"
                )
            async with self._means.database.begin() as connection:
                is_ended = await end_batch(connection, batch, output, errors)
        finally:
            if not is_ended:
                for file in (output, errors):
                    if file is not None:
                        await self._store.delete(file.file_id)

    async def _write(self, batch: OpenBatch, ending: Ending) -> tuple[NewFile | None, int]:
        """Store one file's lines. Returns the file, None if it has no lines, and their number."""
        now_s = self._means.clock.now()
        file_id = mint_file_id(now_s, secrets.randbits(NUM_RANDOM_BITS))
        num_lines = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal num_lines
            pending, size = list[bytes](), 0
            async for line in result_lines(self._means.database, batch.batch_id, ending):
                num_lines += 1
                pending.append(line)
                size += len(line)
                if size >= CHUNK_BYTES:
                    yield b"".join(pending)
                    pending, size = [], 0
            yield b"".join(pending)

        num_bytes = await self._store.write(file_id, chunks())
        if not num_lines:
            await self._store.delete(file_id)
            return None, 0
        word = "output" if ending == "completed" else "error"
        filename = f"{batch.batch_id}_{word}.jsonl"
        file = NewFile(file_id, batch.tenant_id, "batch_output", filename, num_bytes)
        return file, num_lines
