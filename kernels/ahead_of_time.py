"""Compiles Triton's kernels for GPUs that are not here, and reports what they would take there.

    python -m kernels.ahead_of_time                          every configuration, every GPU
    python -m kernels.ahead_of_time --capability 90 --only paged

What is compiled is listed in `kernels/configurations/` (how: see `configuration.py`), so that a
kernel that spills its registers, asks for more shared memory than there is, or misses the tensor
cores is found on a machine without a GPU. How fast it is, only a GPU can tell. Nothing stays on
disk: Triton's cache is a folder that goes when its user is done.
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import configurations
from kernels.configuration import Configuration

# Shared memory that one program can have, in bytes, by compute capability.
SHARED_MEMORY_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CAPABILITIES = tuple(SHARED_MEMORY_LIMITS)
_TENSOR_CORE = re.compile(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What one configuration takes on one GPU: registers of a thread, bytes of a program.

    `stack_bytes` of a thread are spilled registers: none of our kernels has arrays of its own.
    `tensor_core` is the instruction for tiles in its PTX, None without one.
    """

    name: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_core: str | None
    compile_s: float


def registered(capability: int) -> Iterator[Configuration]:
    """What is launched on GPUs of this capability, file by file."""
    for module in pkgutil.iter_modules(configurations.__path__):
        listed = importlib.import_module(f"{configurations.__name__}.{module.name}")
        yield from listed.configurations(capability)


@contextmanager
def scratch_cache() -> Iterator[None]:
    """Inside, Triton keeps what it compiles in a folder that is removed at the end."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def compile_ahead(configuration: Configuration, capability: int) -> CompiledKernel:
    """Compile for this capability; raises what Triton's compiler raises."""
    began = time.perf_counter()
    compiled = triton.compile(
        _source(configuration),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": configuration.num_warps, "num_stages": configuration.num_stages},
    )
    registers, stack, local = _usage(compiled.asm["cubin"])
    found = _TENSOR_CORE.search(compiled.asm["ptx"])
    return CompiledKernel(
        configuration.name,
        capability,
        registers,
        max(stack, local),
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        found[1] if found else None,
        time.perf_counter() - began,
    )


def main() -> None:
    """Print a table of what was asked for."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="of one GPU only")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    chosen = parser.parse_args()
    line = "{:52} {:>5} {:>9} {:>7} {:>9} {:>5}  {:16} {:>5}\n"
    names = ("kernel", "sm", "registers", "spilled", "shared", "warps", "tensor cores", "s")
    sys.stdout.write(line.format(*names))
    with scratch_cache():
        for capability in CAPABILITIES if chosen.capability is None else (chosen.capability,):
            for configuration in registered(capability):
                if chosen.only in configuration.name:
                    sys.stdout.write(line.format(*_cells(compile_ahead(configuration, capability))))
                    sys.stdout.flush()


def _source(configuration: Configuration) -> ASTSource:
    kernel = configuration.kernel
    signature = {name: configuration.types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, type_name in enumerate(signature.values())
        if type_name.startswith("*") or type_name.endswith(":16")
    }
    plain = {name: type_name.removesuffix(":16") for name, type_name in signature.items()}
    return ASTSource(kernel, plain, dict(configuration.constants), aligned)


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and local bytes of a thread, read by a tool that Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        told = subprocess.run(  # noqa: S603 - the tool is Triton's, the file is ours
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", os.fspath(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = _USAGE.search(told)
    assert found is not None, told
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack, local


def _cells(compiled: CompiledKernel) -> tuple[str, ...]:
    return (
        compiled.name,
        str(compiled.capability),
        str(compiled.registers),
        str(compiled.stack_bytes),
        str(compiled.shared_bytes),
        str(compiled.num_warps),
        compiled.tensor_core or "-",
        f"{compiled.compile_s:.1f}",
    )


if __name__ == "__main__":
    main()
