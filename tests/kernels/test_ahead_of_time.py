"""What the Triton kernels take on GPUs that are not here, read from the code compiled for them.

On Hopper all that is registered; on the others what stands for the rest: `python -m
kernels.ahead_of_time` compiles everything everywhere.
"""

from collections.abc import Iterator

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from kernels.ahead_of_time import (  # noqa: E402 - what stands above decides whether it can be
    CAPABILITIES,
    SHARED_MEMORY_LIMITS,
    CompiledKernel,
    compile_ahead,
    registered,
    scratch_cache,
)
from kernels.configuration import Configuration  # noqa: E402

HOPPER = 90
ELSEWHERE = (
    *("paged_attention llama chunk", "paged_attention llama decode, split", "merge_parts 8 x 128"),
    *(
        "rope_store qwen3, norms",
        "copy_blocks 16 x 128",
        "rms_norm 4096",
        "silu_mul",
        "sample fp32",
    ),
    *("scaled_matmul i8, 16 rows", "scaled_matmul i8, 1024 rows"),
)
Compiled = list[tuple[Configuration, CompiledKernel]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    with scratch_cache():
        yield [
            (configuration, compile_ahead(configuration, capability))
            for capability in CAPABILITIES
            for configuration in registered(capability)
            if capability == HOPPER or configuration.name in ELSEWHERE
        ]


def test_each_architecture_has_what_stands_for_the_rest(compiled: Compiled) -> None:
    for capability in CAPABILITIES:
        names = {kernel.name for _, kernel in compiled if kernel.capability == capability}
        assert names >= set(ELSEWHERE)


def test_no_kernel_spills_registers(compiled: Compiled) -> None:
    assert [kernel for _, kernel in compiled if kernel.stack_bytes] == []


def test_shared_memory_is_within_each_architectures_limit(compiled: Compiled) -> None:
    for _, kernel in compiled:
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMITS[kernel.capability], kernel


def test_products_are_computed_on_tensor_cores(compiled: Compiled) -> None:
    for configuration, kernel in compiled:
        assert (kernel.tensor_core is not None) == configuration.uses_dot, kernel


def test_high_products_are_wgmma_on_hopper_and_those_of_bfloat16_tcgen05_on_blackwell(
    compiled: Compiled,
) -> None:
    hopper = [
        kernel.tensor_core
        for configuration, kernel in compiled
        if kernel.capability == HOPPER
        and configuration.uses_dot
        and not configuration.has_low_tiles
    ]
    assert set(hopper) == {"wgmma.mma_async"}
    chunks = {k.capability: k.tensor_core for _, k in compiled if k.name == ELSEWHERE[0]}
    # For int8, Triton has no such instruction of Blackwell's: mma.sync is what it takes.
    assert chunks == {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def test_a_configuration_that_forgets_an_argument_is_refused() -> None:
    known = next(iter(registered(HOPPER)))
    with pytest.raises(AssertionError, match="lacking"):
        Configuration("lacking", known.kernel, {}, known.constants)
