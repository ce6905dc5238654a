"""What was measured on a GPU, as values and in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_timing import Ceilings


@dataclass(frozen=True, slots=True)
class KernelNumbers:
    """How wrong a kernel was, how long it took, and what share of the roof that is."""

    error: float
    bound: float
    seconds: float
    share_of_roof: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel at one shape; without numbers, `failure` says why."""

    name: str
    numbers: KernelNumbers | None = None
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it ran and gave what it must. NaN is not."""
        return self.numbers is not None and self.numbers.error <= self.numbers.bound

    def line(self) -> str:
        """The row of a table."""
        numbers = self.failure
        if self.numbers is not None:
            numbers = (
                f"{self.numbers.error:10.1e}{self.numbers.bound:9.0e}"
                f"{self.numbers.seconds * 1e6:12.1f}{100 * self.numbers.share_of_roof:11.1f}"
            )
        return f"{self.name:<58}{numbers}{'' if self.is_right else '  WRONG'}"


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Seconds of a step, launched kernel by kernel and, on a GPU, as one graph."""

    eager_s: float
    graph_s: float | None
    least_s: float

    @property
    def best_s(self) -> float:
        """The faster way."""
        return self.eager_s if self.graph_s is None else min(self.eager_s, self.graph_s)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the model: `sequences` with `context` tokens stored and `new_tokens` each."""

    weights: str
    sequences: int
    context: int
    new_tokens: int
    numbers: StepNumbers | None = None
    failure: str = ""

    def line(self) -> str:
        """The row of a table."""
        name = f"{self.weights}, {self.sequences} x {self.new_tokens} after {self.context}"
        numbers = self.failure
        if self.numbers is not None:
            best = self.numbers.best_s
            graph = "-" if self.numbers.graph_s is None else f"{self.numbers.graph_s * 1e3:.3f}"
            numbers = (
                f"{self.numbers.eager_s * 1e3:11.3f}{graph:>11}"
                f"{self.sequences * self.new_tokens / best:12.0f}"
                f"{100 * self.numbers.least_s / best:11.1f}"
            )
        return f"{name:<44}{numbers}"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured on one device, with the software named in `device`."""

    device: str
    ceilings: Ceilings
    kernels: Sequence[KernelRow]
    steps: Sequence[StepRow]
    wall_s: float

    @property
    def is_right(self) -> bool:
        """Whether every kernel gave what it must, and every step ran."""
        return all(row.is_right for row in self.kernels) and not any(
            row.failure for row in self.steps
        )

    def table(self) -> str:
        """The measurement in words."""
        rates = ", ".join(
            f"{unit} {rate / 1e12:.2f}" for unit, rate in self.ceilings.operations.items()
        )
        return "\n".join(
            [
                f"{self.device}, measured in {self.wall_s:.0f} s",
                f"ceilings: copy {self.ceilings.bytes_per_s / 1e9:.1f} GB/s, "
                f"products in 10^12 operations/s: {rates}",
                "",
                f"{'kernel':<58}{'error':>10}{'bound':>9}{'us':>12}{'% of roof':>11}",
                *(row.line() for row in self.kernels),
                "",
                f"{'step':<44}{'eager ms':>11}{'graph ms':>11}{'tokens/s':>12}{'% of roof':>11}",
                *(row.line() for row in self.steps),
            ]
        )
