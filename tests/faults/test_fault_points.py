"""The list of fault points, and the places where they stand."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from control.faults import FAULT_POINTS, UnknownFault, arm

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "cli", "control", "engine", "workers")


def points_in_the_code() -> Counter[str]:
    """Every name that `fault_point` is called with."""
    found: Counter[str] = Counter()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "fault_point":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}: a name is written out"
                found[str(name.value)] += 1
    return found


def test_every_fault_point_of_the_list_stands_in_the_code_and_no_other() -> None:
    assert set(points_in_the_code()) == set(FAULT_POINTS)


@pytest.mark.parametrize("words", ["nowhere", "settle.after_commit:0", "settle.after_commit:x"])
def test_a_process_is_not_armed_for_what_is_no_point(words: str) -> None:
    with pytest.raises(UnknownFault):
        arm(words, is_test_build=True)


def test_only_a_test_build_is_armed() -> None:
    with pytest.raises(UnknownFault, match="HEADRACE_TEST_BUILD"):
        arm("settle.after_commit", is_test_build=False)


def test_an_armed_process_dies_at_the_point_when_its_time_has_come() -> None:
    program = """
from control.faults import arm, fault_point
arm("settle.after_commit:2", is_test_build=True)
fault_point("settle.before_commit")
fault_point("settle.after_commit")
print("once", flush=True)
fault_point("settle.after_commit")
print("twice", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-9, "once\n"), done.stderr
