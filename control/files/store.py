"""Where the bytes of files lie. The rows in `files` say whose they are.

An object's key is minted by us; nothing that a caller sends ever becomes part of one. An object
is there whole or not at all, and never changes. The local folder is one implementation of
`FileStore`; an object store speaks the same few words.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

CHUNK_BYTES = 256 * 1024

_KEY = re.compile(r"file-[0-9a-z]{26}")


class ObjectNotFound(Exception):
    """The store holds nothing under that key."""


class FileStore(Protocol):
    """Write once, read from anywhere in it, delete."""

    async def write(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        """Store the bytes under a key that holds nothing yet. Returns how many there were.

        When `chunks` raises, nothing is stored.
        """
        ...

    def read(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes [start, end) in chunks. Raises ObjectNotFound before the first."""
        ...

    async def delete(self, key: str) -> None:
        """Forget the bytes; forgetting twice is harmless."""
        ...


class LocalFileStore:
    """Objects as files of one folder, which gateways and batch workers must share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def write(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        """Store the bytes: beside their place first, then by one rename into it."""
        path, num_bytes = self._path(key), 0
        with _partial_file(self._folder) as (file, partial):
            async for chunk in chunks:
                await asyncio.to_thread(file.write, chunk)
                num_bytes += len(chunk)
            await asyncio.to_thread(_put_in_place, file, partial, path)
        return num_bytes

    async def read(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes [start, end) in chunks."""
        try:
            file = await asyncio.to_thread(self._path(key).open, "rb")
        except FileNotFoundError as error:
            raise ObjectNotFound(key) from error
        with file:
            file.seek(start)
            left = None if end is None else max(0, end - start)
            while left is None or left > 0:
                size = CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)
                chunk = await asyncio.to_thread(file.read, size)
                if not chunk:
                    return
                if left is not None:
                    left -= len(chunk)
                yield chunk

    async def delete(self, key: str) -> None:
        """Forget the bytes."""
        await asyncio.to_thread(self._path(key).unlink, missing_ok=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a key of ours")
        return self._folder / key


@contextmanager
def _partial_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A file beside the objects, gone at the end unless it was put in its place."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".part-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _put_in_place(file: BinaryIO, partial: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    partial.rename(path)
