"""What a replica's engine produced, step by step: a file that the ledger is checked against.

One folder for each replica, of numbered files that only it appends to. A file is frames: four
bytes of big-endian length and a msgpack array.

    ["replica", replica id, model]                the first frame of every file
    ["attempt", handle, request id, attempt, offset]
                                                  it goes on from `offset` delivered tokens
    ["step", handle, tokens, handle, tokens, ...] what one step produced

A step is written before anything of it is published, in one write, so that of a replica that was
killed every token that anybody saw is here. A frame that is torn at the end of a file was never
published and is not read. Not written through to the disk: a machine that loses power loses its
last seconds, and with them the proof, never the bill.

A file is followed by the next when it is full; the oldest go when the folder is. What remains
says for which attempts it knows everything: those whose "attempt" frame is there.

While its replica lives, be it stopped, the folder is locked. Nothing is added to one that is not.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 16 * 2**20
MAX_FILES = 16
# Below the data folder.
STEP_LOG_FOLDER = "steps"

_LOCK = "lock"
_BOOKED = "booked"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[int | str])


@dataclass(slots=True)
class Produced:
    """One attempt as its replica's engine saw it.

    It went on from `offset` tokens that were delivered before, and made `num_tokens`, over all
    choices.
    """

    request_id: str
    attempt: int
    replica_id: str
    model: str
    offset: int
    num_tokens: int = 0


class StepLog:
    """The log of one replica, for one thread."""

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        model: str,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self._folder = folder / replica_id
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._head = ("replica", replica_id, model)
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        # Of each request that is here: its attempt, and by what number the log calls it.
        self._begun: dict[str, tuple[int, int]] = {}
        self._num_handles = 0
        self._number = 0
        self._num_bytes = 0
        self._open()

    def begin(self, request_id: str, attempt: int, offset: int) -> None:
        """An attempt is here, and goes on from `offset` tokens that were delivered before.

        It takes the place of an earlier attempt of the same request. Said again, it is no news.
        """
        known, _ = self._begun.get(request_id, (None, 0))
        if known == attempt:
            return
        self._num_handles += 1
        self._begun[request_id] = (attempt, self._num_handles)
        self._write([("attempt", self._num_handles, request_id, attempt, offset)])

    def step(self, num_tokens: Mapping[str, int]) -> None:
        """What one step produced of each request that is here."""
        words: list[int | str] = ["step"]
        for request_id, count in num_tokens.items():
            _, handle = self._begun[request_id]
            words += (handle, count)
        self._write([words])
        if self._num_bytes > self._max_file_bytes:
            self._next_file()

    def end(self, request_id: str) -> None:
        """Nothing more comes of the request; harmless if nothing came."""
        self._begun.pop(request_id, None)

    def close(self) -> None:
        """Let go of the files: nothing more comes."""
        os.close(self._file)
        os.close(self._lock)

    def _next_file(self) -> None:
        os.close(self._file)
        self._number += 1
        self._open()
        oldest = self._folder / _name(self._number - self._max_files)
        oldest.unlink(missing_ok=True)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / _name(self._number), flags, 0o640)
        self._num_bytes = 0
        self._write([self._head])

    def _write(self, frames: Iterable[object]) -> None:
        data = b"".join(map(_framed, frames))
        os.write(self._file, data)
        self._num_bytes += len(data)


def living_replicas(folder: Path) -> frozenset[str]:
    """The replicas that may still add to their logs."""
    return frozenset(replica.name for replica in _replicas(folder) if _is_locked(replica))


def dead_replicas(folder: Path) -> list[Path]:
    """Folders of replicas that are gone and of which `mark_booked` has not been said."""
    return [
        replica
        for replica in _replicas(folder)
        if not (replica / _BOOKED).exists() and not _is_locked(replica)
    ]


def mark_booked(replica_folder: Path) -> None:
    """Of a dead replica everything is booked."""
    (replica_folder / _BOOKED).touch()


def remove_old(folder: Path, max_age_s: float) -> int:
    """Remove the logs of replicas of which everything was booked so long ago. Returns how many."""
    num_removed = 0
    for replica in _replicas(folder):
        booked = replica / _BOOKED
        if booked.exists() and time.time() - booked.stat().st_mtime > max_age_s:
            shutil.rmtree(replica, ignore_errors=True)
            num_removed += 1
    return num_removed


def _replicas(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _is_locked(replica_folder: Path) -> bool:
    try:
        with (replica_folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return True  # It is just being made.
    return False


@dataclass(slots=True)
class _Reading:
    replica_id: str = ""
    model: str = ""
    attempts: dict[int, Produced] = field(default_factory=dict)


def read_step_logs(folder: Path) -> Iterator[Produced]:
    """Every attempt that the replicas below `folder` have begun, as far as the files go."""
    for replica in _replicas(folder):
        yield from read_step_log(replica)


def read_step_log(replica_folder: Path) -> Iterator[Produced]:
    """The attempts of one replica."""
    reading = _Reading()
    for path in sorted(replica_folder.glob("*.steps")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # Its replica has just dropped it.
        for words in _frames(data):
            _take(reading, words)
    yield from reading.attempts.values()


def _take(reading: _Reading, words: list[int | str]) -> None:
    match words:
        case ["replica", str(replica_id), str(model)]:
            reading.replica_id, reading.model = replica_id, model
        case ["attempt", int(handle), str(request_id), int(attempt), int(offset)]:
            reading.attempts[handle] = Produced(
                request_id, attempt, reading.replica_id, reading.model, offset
            )
        case ["step", *pairs]:
            for known_as, count in zip(pairs[::2], pairs[1::2], strict=True):
                produced = reading.attempts.get(int(known_as))
                if produced is not None:  # Its beginning may have been dropped.
                    produced.num_tokens += int(count)


def _framed(words: object) -> bytes:
    body = _encoder.encode(words)
    return len(body).to_bytes(4, "big") + body


def _frames(data: bytes) -> Iterator[list[int | str]]:
    start = 0
    while start + 4 <= len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        if end > len(data):
            return
        yield _decoder.decode(data[start + 4 : end])
        start = end


def _name(number: int) -> str:
    return f"{number:08d}.steps"
