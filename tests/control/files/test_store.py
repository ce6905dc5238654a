"""The local file store: whole or not at all, under our keys alone."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control.files.files import mint_file_id
from control.files.store import CHUNK_BYTES, LocalFileStore, ObjectNotFound

KEY = mint_file_id(1_790_000_000, 5)


@pytest.fixture
def store(tmp_path: Path) -> LocalFileStore:
    """A store in a folder that does not exist yet."""
    return LocalFileStore(tmp_path / "data" / "files")


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    """The chunks, one after another."""
    for chunk in chunks:
        yield chunk


async def read(store: LocalFileStore, start: int = 0, end: int | None = None) -> bytes:
    """Bytes of the one object."""
    return b"".join([chunk async for chunk in store.read(KEY, start, end)])


async def test_what_was_written_is_read_back_from_anywhere(store: LocalFileStore) -> None:
    content = bytes(range(256)) * 3000
    assert await store.write(KEY, stream(content[:10], b"", content[10:])) == len(content)
    assert await read(store) == content
    for start, end in ((0, 0), (3, 7), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (5, None)):
        assert await read(store, start, end) == content[start:end]
    assert await read(store, len(content) + 5) == b""


async def test_an_upload_that_breaks_leaves_nothing(store: LocalFileStore, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await store.write(KEY, broken())
    with pytest.raises(ObjectNotFound):
        await read(store)
    assert list((tmp_path / "data" / "files").iterdir()) == []


async def test_a_deleted_object_is_gone_and_deleting_twice_is_harmless(
    store: LocalFileStore,
) -> None:
    await store.write(KEY, stream(b"x"))
    await store.delete(KEY)
    await store.delete(KEY)
    with pytest.raises(ObjectNotFound):
        await read(store)


@pytest.mark.parametrize("key", ["../../x", "/etc/passwd", "file-", KEY + "/..", KEY + "\0", ""])
async def test_no_text_of_a_callers_becomes_a_path(store: LocalFileStore, key: str) -> None:
    with pytest.raises(ValueError, match="not a key of ours"):
        await store.write(key, stream(b"x"))
    with pytest.raises(ValueError, match="not a key of ours"):
        await store.delete(key)
    with pytest.raises(ValueError, match="not a key of ours"):
        await anext(store.read(key))
