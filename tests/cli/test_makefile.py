"""The Makefile says what it can do, and the build machine does what everybody does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def targets() -> dict[str, str]:
    """Every documented target with its line of help."""
    text = (REPOSITORY / "Makefile").read_text()
    return dict(re.findall(r"^([a-z-]+):.*## (.+)$", text, flags=re.MULTILINE))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_alone_prints_every_target_with_its_meaning() -> None:
    said = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    for name, meaning in targets().items():
        assert f"make {name} " in said.stdout
        assert meaning in said.stdout


def test_the_targets_that_people_are_told_of_exist() -> None:
    assert {"serve", "test", "lint", "types", "contracts", "venv", "lock"} <= targets().keys()


def test_every_phony_target_is_documented() -> None:
    phony = re.findall(r"^\.PHONY: (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)

    assert set(phony) == targets().keys()


def test_the_build_machine_runs_make_test_and_nothing_of_its_own() -> None:
    script = REPOSITORY / ".ci" / "run"
    lines = script.read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]

    assert commands == ["set -eu", 'cd "$(dirname "$0")/.."', "exec make test"]
    assert script.stat().st_mode & 0o111
