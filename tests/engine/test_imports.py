"""Whoever decides does not load torch; checked in a fresh interpreter."""

import subprocess
import sys

import pytest

LIGHT = [
    "engine.interface.prefix_keys",
    "engine.scheduling.scheduler",
    "engine.kv_cache.kv_cache_manager",
    "engine.execution.scripted_runner",
    "engine.engine",
    "engine.loop",
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
