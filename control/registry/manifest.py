"""What a model folder must hold, to the byte.

`manifest.json` lists every file with its size and SHA-256. The digest of the manifest's
canonical form names the weights everywhere else: registry, placement, usage rows. A folder
whose files differ in any way from its manifest is not ready, and files that Python could
execute when loading them have no place in it at all.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_NAME = "manifest.json"

_FORBIDDEN_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".py"})
_WEIGHT_SUFFIX = ".safetensors"
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHORT_LENGTH = 12
_NUM_HASHING_THREADS = 4


class ManifestError(ValueError):
    """The folder is not what its manifest says; the message names the file."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file's size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


def write_manifest(folder: Path) -> str:
    """Describe the folder as it is now in its manifest.json; returns the weights digest.

    Raises ManifestError for a file that may not lie there. An old manifest is replaced.
    """
    entries = dict(_hash_all(folder, _listed(folder)))
    if not any(name.endswith(_WEIGHT_SUFFIX) for name in entries):
        raise ManifestError(f"{folder} holds no {_WEIGHT_SUFFIX} file.")
    canonical = _canonical(entries)
    (folder / MANIFEST_NAME).write_bytes(canonical)
    return hashlib.sha256(canonical).hexdigest()


def verify_manifest(folder: Path) -> str:
    """Check every file of the folder; returns the weights digest, 64 hexadecimal digits.

    Raises ManifestError naming the first file that is missing, extra, changed, a link, or of
    a kind that is never loaded.
    """
    return _verify(folder, weights_too=True)


def verify_text_files(folder: Path) -> str:
    """Check all files but the weights, which may be absent; returns the same digest.

    Enough for a process that only tokenises: it trusts nothing that it does not read.
    """
    return _verify(folder, weights_too=False)


def short_digest(weights_digest: str) -> str:
    """The first digits of a weights digest, for people."""
    return weights_digest[:_SHORT_LENGTH]


def _verify(folder: Path, *, weights_too: bool) -> str:
    entries = _read_manifest(folder)
    present = _listed(folder)
    for name in present:
        if name not in entries:
            raise ManifestError(f"{folder / name} is not in the manifest.")
    checked = [n for n in entries if weights_too or not n.endswith(_WEIGHT_SUFFIX)]
    for name in checked:
        if name not in present:
            raise ManifestError(f"{folder / name} is in the manifest but missing.")
        size = (folder / name).stat().st_size
        if size != entries[name].size:
            raise ManifestError(
                f"{folder / name} has {size} bytes; the manifest says {entries[name].size}."
            )
    for name, found in _hash_all(folder, checked):
        if found != entries[name]:
            raise ManifestError(f"{folder / name} was changed: its SHA-256 differs.")
    return hashlib.sha256(_canonical(entries)).hexdigest()


def _listed(folder: Path) -> list[str]:
    """Names of the folder's files except the manifest, each checked for its kind."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths
    except OSError as error:
        raise ManifestError(f"{folder} cannot be listed: {error.strerror}.") from error
    for name in names:
        path = folder / name
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not an ordinary file"
            raise ManifestError(f"{path} is {kind}; a model folder holds files only.")
        if path.suffix.lower() in _FORBIDDEN_SUFFIXES:
            raise ManifestError(
                f"{path} could run code when loaded; weights come as {_WEIGHT_SUFFIX} only."
            )
    return [name for name in names if name != MANIFEST_NAME]


def _hash_all(folder: Path, names: Iterable[str]) -> list[tuple[str, FileEntry]]:
    """Hash files side by side: hashlib works without the interpreter's lock."""

    def entry_of(name: str) -> tuple[str, FileEntry]:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return name, FileEntry(size=file.tell(), sha256=digest)

    with ThreadPoolExecutor(_NUM_HASHING_THREADS) as threads:
        return list(threads.map(entry_of, names))


def _canonical(entries: dict[str, FileEntry]) -> bytes:
    document = {"version": 1, "files": {name: asdict(entry) for name, entry in entries.items()}}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _read_manifest(folder: Path) -> dict[str, FileEntry]:
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("version") != 1:
        raise ManifestError(f"{path} is not a manifest of version 1.")
    files = document.get("files")
    if not isinstance(files, dict):
        raise ManifestError(f"{path} has no list of files.")
    return {name: _entry(path, name, value) for name, value in files.items()}


def _entry(path: Path, name: str, value: object) -> FileEntry:
    if name in {"", ".", "..", MANIFEST_NAME} or "/" in name:
        raise ManifestError(f"{path} lists {name!r}, which is not the name of a file beside it.")
    fields = value if isinstance(value, dict) else {}
    size, sha256 = fields.get("size"), fields.get("sha256")
    if (
        not isinstance(size, int)
        or not isinstance(sha256, str)
        or not _HEX_DIGEST.fullmatch(sha256)
    ):
        raise ManifestError(f"{path} lists {name!r} without a proper size and SHA-256.")
    return FileEntry(size=size, sha256=sha256)
