"""Which model a serve offers, and its description for the registry.

Without a wish it is the demo model, fetched into the weight store by a process of its own (the
conversion needs memory that the supervisor should not keep). A folder of a person's own is
served under the folder's name, and its version is named by its weights, so that changed
weights are a new version and never the old one with other words.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cli.errors import CommandFailed
from cli.processes import headrace
from control.registry.manifest import (
    MANIFEST_NAME,
    ManifestError,
    short_digest,
    verify_manifest,
    write_manifest,
)
from control.registry.model_version import ModelVersion
from workers.scripted_model import SCRIPTED_MODEL, make_scripted_model

_MAX_OUTPUT_TOKENS = 4096


class ModelNotServable(CommandFailed):
    """The model cannot be offered; the message says what is wrong with it."""


async def find_model(
    wish: str | None, weight_store: Path, is_test_build: bool, progress: Callable[[str], None]
) -> ModelVersion:
    """The wished model, verified to the byte. Raises ModelNotServable."""
    if wish is None:
        folder = await _fetch_demo_model(weight_store, progress)
        return await asyncio.to_thread(_describe, folder, folder.parent.name, folder.name)
    if wish == SCRIPTED_MODEL:
        if not is_test_build:
            raise ModelNotServable("The scripted model is served only with HEADRACE_TEST_BUILD=1.")
        folder = await asyncio.to_thread(make_scripted_model, weight_store)
        return await asyncio.to_thread(_describe, folder, SCRIPTED_MODEL, folder.name)
    return await asyncio.to_thread(_describe, Path(wish), None, None)


async def _fetch_demo_model(weight_store: Path, progress: Callable[[str], None]) -> Path:
    process = await asyncio.create_subprocess_exec(
        *headrace("weights", "fetch", "--weight-store", str(weight_store)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said = []
        async for line in process.stderr:
            said.append(line.decode(errors="replace").rstrip())
            progress(said[-1])
        output = await process.stdout.read()
        if await process.wait() != 0:
            raise ModelNotServable("The demo model could not be fetched:\n" + "\n".join(said))
        return Path(output.decode().strip())
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _describe(folder: Path, model: str | None, version: str | None) -> ModelVersion:
    folder = folder.absolute()
    try:
        if not (folder / MANIFEST_NAME).exists():
            write_manifest(folder)
        weights_digest = verify_manifest(folder)
        config = json.loads((folder / "config.json").read_bytes())
        max_model_len = int(config["max_position_embeddings"])
    except (ManifestError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotServable(f"{folder} is not a model that can be served: {error}") from error
    return ModelVersion(
        model=model or folder.name,
        version=version or short_digest(weights_digest),
        weights_digest=weights_digest,
        weights_folder=str(folder),
        max_model_len=max_model_len,
        max_output_tokens=min(_MAX_OUTPUT_TOKENS, max_model_len),
        created_at=datetime.now(UTC),
        is_in_force=True,
    )
