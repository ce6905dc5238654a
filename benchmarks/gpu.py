"""What the Triton kernels do on one GPU: are they right, how near the roof, how fast a model.

In six minutes at most: every kernel against float64, then against the measured copy bandwidth and
matrix products; then the steps of a model of random weights in the shape of Llama-3-8B, decode by
batch and prefill, launched kernel by kernel and as CUDA graphs. Prints a table, and writes JSON
if asked. It needs torch and Triton only, so it runs where nothing else of ours is installed:

    python -m benchmarks.gpu --json gpu.json
    TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny          anywhere: tries out the code

A kernel that does not compile, or a step that finds no room or no time, is a line of the table.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

from benchmarks.gpu_attention import PagedCache, attention_cases, cache_cases, num_slots
from benchmarks.gpu_kernels import Case, Place, linear_cases, rowwise_cases, sampling_cases
from benchmarks.gpu_model import LINEARS, Model, TritonLlama
from benchmarks.gpu_report import KernelNumbers, KernelRow, Report, StepNumbers, StepRow
from benchmarks.gpu_shape import LLAMA_3_8B, TINY, LlamaShape
from benchmarks.gpu_timing import Ceilings, Stopwatch, measure_ceilings
from benchmarks.result_file import write_results

Size = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: kernels by rows, steps by (sequences, tokens stored, new tokens).

    Nothing is begun after `limit_s`.
    """

    shape: LlamaShape
    place: Place
    rows: int
    sampled_rows: Sequence[int]
    linear_rows: Sequence[int]
    attended: Sequence[Size]
    steps: Sequence[Size]
    rounds: int
    square: int
    limit_s: float = 330.0


class CannotMeasure(RuntimeError):
    """There is no device for this; the message says what to do."""


Build = Callable[[Plan, str], Model]


def gpu_plan() -> Plan:
    """What fits into a GPU of 80 GB and six minutes."""
    decodes = [(2**i, 1024, 1) for i in range(9)]
    prefills = [(1, 0, 512), (1, 0, 2048), (8, 0, 2048)]
    return Plan(
        shape=LLAMA_3_8B,
        place=Place(torch.device("cuda"), torch.bfloat16),
        rows=4096,
        sampled_rows=(1, 256),
        linear_rows=(1, 16, 64, 256, 4096),
        attended=((1, 16_383, 1), (64, 1023, 1), (256, 1023, 1), (1, 0, 4096), (4, 4096, 512)),
        steps=decodes + prefills,
        rounds=15,
        square=8192,
    )


def tiny_plan() -> Plan:
    """The same code in seconds, on a CPU, through Triton's interpreter."""
    return Plan(
        shape=replace(TINY, layers=1),
        place=Place(torch.device("cpu"), torch.float32),
        rows=2,
        sampled_rows=(1,),
        linear_rows=(2,),
        attended=((2, 19, 1), (1, 0, 5)),
        steps=((2, 7, 1), (1, 0, 3)),
        rounds=1,
        square=64,
    )


def own_model(plan: Plan, weights: str) -> Model:
    """The model that is measured if nobody brings another."""
    tokens = [context + new_tokens for _, context, new_tokens in plan.steps]
    slots = [num_slots(size[0], length) for size, length in zip(plan.steps, tokens, strict=True)]
    cache = PagedCache(plan.shape, plan.place, max(slots), max(tokens))
    return TritonLlama(plan.shape, plan.place, weights, cache)


def measure(plan: Plan, build: Build = own_model) -> Report:
    """Check and time all of it. `build` makes the model, by the kind of its weights."""
    torch.manual_seed(0)
    started = time.perf_counter()
    device = plan.place.device
    stopwatch = Stopwatch(device, plan.rounds, started + plan.limit_s)
    ceilings = measure_ceilings(stopwatch, device, plan.square)
    kernels = [_kernel_row(case, stopwatch, ceilings) for case in _cases(plan)]
    steps = [
        row for weights in LINEARS for row in _step_rows(plan, weights, build, stopwatch, ceilings)
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted, no GPU"
    name += f", torch {torch.__version__}, triton {triton.__version__}"
    return Report(name, ceilings, kernels, steps, time.perf_counter() - started)


def run(file: Path | None = None, is_tiny: bool = False) -> None:
    """Print the table and write it as JSON; the exit status says whether all was right."""
    if is_tiny and not triton.knobs.runtime.interpret:
        raise CannotMeasure("The tiny run is interpreted: set TRITON_INTERPRET=1 and start again.")
    if not is_tiny and not torch.cuda.is_available():
        raise CannotMeasure("torch sees no GPU here; --tiny tries the code out without one.")
    report = measure(tiny_plan() if is_tiny else gpu_plan())
    sys.stdout.write(report.table() + "\n")
    write_results(file, "gpu", asdict(report))
    if not report.is_right:
        raise SystemExit(1)


def main() -> None:
    """Run by the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on one GPU.")
    parser.add_argument("--tiny", action="store_true", help="on a CPU; set TRITON_INTERPRET=1")
    parser.add_argument("--json", type=Path, help="write the results here too")
    chosen = parser.parse_args()
    try:
        run(chosen.json, chosen.tiny)
    except CannotMeasure as reason:
        parser.error(str(reason))


def _cases(plan: Plan) -> Iterator[Case]:
    yield from rowwise_cases(plan.shape, plan.rows, plan.place)
    for rows in plan.sampled_rows:
        yield from sampling_cases(plan.shape, rows, plan.place)
    for rows in plan.linear_rows:
        yield from linear_cases(plan.shape, rows, plan.place)
    yield from cache_cases(plan.shape, plan.place, plan.rows)
    yield from attention_cases(plan.shape, plan.place, plan.attended)


def _kernel_row(case: Case, stopwatch: Stopwatch, ceilings: Ceilings) -> KernelRow:
    try:
        error = case.error()
        seconds = stopwatch.seconds(case.timed or case.run)
    except Exception as failure:  # noqa: BLE001 - one kernel's end is a line, not that of the run
        return KernelRow(case.name, failure=_in_short(failure))
    least = ceilings.seconds(case.num_bytes, case.num_operations, case.unit)
    return KernelRow(case.name, KernelNumbers(error, case.bound, seconds, least / seconds))


def _step_rows(
    plan: Plan, weights: str, build: Build, stopwatch: Stopwatch, ceilings: Ceilings
) -> Iterator[StepRow]:
    try:
        model = build(plan, weights)
    except Exception as failure:  # noqa: BLE001 - no room for one kind of weights is a line too
        yield StepRow(weights, 0, 0, 0, failure=_in_short(failure))
        return
    for size in plan.steps:
        try:
            numbers = _step_numbers(model.step(*size), stopwatch, plan.place.device)
            least = ceilings.seconds(*model.least_cost(*size), weights)
            yield StepRow(weights, *size, StepNumbers(*numbers, least))
        except Exception as failure:  # noqa: BLE001 - as above
            yield StepRow(weights, *size, failure=_in_short(failure))


def _step_numbers(
    step: Callable[[], object], stopwatch: Stopwatch, device: torch.device
) -> tuple[float, float | None]:
    eager = stopwatch.seconds(step, flushes=False)
    if device.type != "cuda":
        return eager, None
    return eager, stopwatch.seconds(_captured(step), flushes=False)


def _captured(step: Callable[[], object]) -> Callable[[], None]:
    """The step as a CUDA graph: launched as one, whatever it consists of."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _in_short(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:160]


if __name__ == "__main__":
    main()
