"""What the GPU benchmark says of its numbers. The kernels run in tests/kernels."""

import math
import time

import pytest
import torch

from benchmarks.gpu_report import KernelNumbers, KernelRow, Report, StepNumbers, StepRow
from benchmarks.gpu_timing import Ceilings, Stopwatch

CEILINGS = Ceilings(bytes_per_s=1e12, operations={"bf16": 1e14, "fp8": 4e14})


def kernel(error: float) -> KernelRow:
    return KernelRow("rms_norm", KernelNumbers(error, 5e-3, 20e-6, 0.8))


def report(*kernels: KernelRow, steps: tuple[StepRow, ...] = ()) -> Report:
    return Report("a GPU", CEILINGS, kernels, steps, 1.0)


def test_the_roof_is_what_takes_longer() -> None:
    assert CEILINGS.seconds(10**12, 10**13, "bf16") == 1.0
    assert CEILINGS.seconds(10**12, 4 * 10**14, "bf16") == 4.0
    assert CEILINGS.seconds(10**12, 8 * 10**14, "fp8") == 2.0
    assert CEILINGS.seconds(1, 10**14, "a unit that torch does not have") == 1.0


def test_a_kernel_that_is_wrong_or_fails_makes_the_run_fail_and_says_so() -> None:
    assert report(kernel(1e-3)).is_right
    for row in (kernel(6e-3), kernel(math.nan), KernelRow("rms_norm", failure="no room")):
        assert not report(kernel(1e-3), row).is_right
        assert "WRONG" in report(row).table()
    assert "no room" in report(KernelRow("rms_norm", failure="no room")).table()
    assert not report(steps=(StepRow("fp8", 1, 2, 3, failure="no room"),)).is_right


def test_a_step_counts_by_its_faster_way() -> None:
    step = StepRow("bf16", 8, 1024, 1, StepNumbers(eager_s=0.02, graph_s=0.01, least_s=0.005))
    fields = report(steps=(step,)).table().splitlines()[-1].split()
    assert fields[-4:] == ["20.000", "10.000", "800", "50.0"]
    alone = StepRow("bf16", 1, 0, 5, StepNumbers(eager_s=0.01, graph_s=None, least_s=0.005))
    assert report(steps=(alone,)).table().splitlines()[-1].split()[-3:] == ["-", "500", "50.0"]


def test_nothing_is_timed_after_the_deadline() -> None:
    runs: list[int] = []
    cpu, now = torch.device("cpu"), time.perf_counter()
    assert Stopwatch(cpu, 3, now + 60).seconds(lambda: runs.append(1)) >= 0
    with pytest.raises(TimeoutError, match="no time"):
        Stopwatch(cpu, 3, now - 1).seconds(lambda: runs.append(1))
    assert len(runs) == 3
