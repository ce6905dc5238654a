"""Seconds on a device, and what the device can do at best: the roof of every roofline.

On a GPU a run lies between two events, behind a write that empties the L2 cache and that takes
long enough for the host to have queued the run by the time it begins: launches cost nothing
unless they cost more than that. On a CPU, which is for trying the code out, it is the clock.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_WARM_UP = 3
_FLUSH_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured here: bytes per second copied (read and written), operations per second.

    `operations` is by unit: "bf16", and "fp8" and "int8" where torch has such a product here.
    """

    bytes_per_s: float
    operations: dict[str, float]

    def seconds(self, num_bytes: int, num_operations: int, unit: str) -> float:
        """The least that so many bytes and operations take."""
        rate = self.operations.get(unit, self.operations["bf16"])
        return max(num_bytes / self.bytes_per_s, num_operations / rate)


class Stopwatch:
    """Times runs on one device, until it is too late for another: `deadline` is a perf_counter."""

    def __init__(self, device: torch.device, rounds: int, deadline: float) -> None:
        self._rounds = rounds
        self._deadline = deadline
        self._flushed: Tensor | None = None
        if device.type == "cuda":
            self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], object], flushes: bool = True) -> float:
        """The median of several runs, each from a cold cache unless told otherwise.

        Raises TimeoutError after the deadline.
        """
        if time.perf_counter() > self._deadline:
            raise TimeoutError("no time was left")
        if self._flushed is None:
            return statistics.median(_clocked(run) for _ in range(self._rounds))
        for _ in range(_NUM_WARM_UP):
            run()
        begins, ends = _events(self._rounds), _events(self._rounds)
        for begin, end in zip(begins, ends, strict=True):
            if flushes:
                self._flushed.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        milliseconds: list[float] = [
            begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)
        ]
        return statistics.median(milliseconds) / 1000


def measure_ceilings(stopwatch: Stopwatch, device: torch.device, size: int) -> Ceilings:
    """A copy of 16 x size^2 bytes, and products of square matrices of `size`."""
    source = torch.randn(4 * size, size, device=device)
    target = torch.empty_like(source)
    copied = stopwatch.seconds(lambda: target.copy_(source))
    rates = {}
    for unit, product in _products(device, size).items():
        try:
            rates[unit] = 2 * size**3 / stopwatch.seconds(product)
        except (RuntimeError, NotImplementedError):
            # This torch has no such product for this device; bfloat16 it has everywhere.
            continue
    return Ceilings(2 * source.numel() * source.element_size() / copied, rates)


def _products(device: torch.device, size: int) -> dict[str, Callable[[], Tensor]]:
    # Random numbers: multiplying zeros takes less power, and so less time, than real data.
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    half = left.bfloat16(), right.bfloat16()
    int8 = tuple((x * 30).clamp(-127, 127).to(torch.int8) for x in (left, right))
    fp8 = tuple(x.to(torch.float8_e4m3fn) for x in (left, right))
    one = torch.ones((), device=device)
    return {
        "bf16": lambda: half[0] @ half[1].T,
        "int8": lambda: torch._int_mm(int8[0], int8[1].T),
        "fp8": lambda: torch._scaled_mm(
            fp8[0], fp8[1].T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        ),
    }


def _events(count: int) -> list[torch.cuda.Event]:
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [new_event(enable_timing=True) for _ in range(count)]


def _clocked(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
