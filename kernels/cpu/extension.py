"""The kernels for CPUs, if they were built; torch's own operators do the work otherwise."""

import logging
from functools import cache
from types import ModuleType

_log = logging.getLogger(__name__)


@cache
def extension() -> ModuleType | None:
    """`kernels.cpu.native`, or None where there is none, which is said once."""
    try:
        from kernels.cpu import native  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        _log.warning(
            "The CPU kernels were not built (%s): the engine computes with torch's operators, "
            "several times slower. Install a C++ compiler, then run `pip install -e .` again.",
            error,
        )
        return None
    return native
