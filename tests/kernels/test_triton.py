"""Runs the tests of the Triton kernels in a process in which Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETED

FOLDER = Path(__file__).parent


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run here already")
def test_the_triton_kernels_hold_in_the_interpreter() -> None:
    files = sorted({file for pattern in INTERPRETED for file in FOLDER.glob(pattern)})
    command = [sys.executable, "-m", "pytest", f"--confcutdir={FOLDER}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
