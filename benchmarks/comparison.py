"""What a comparison found: every run of every engine, and the table of ratios with its bars.

A bar is a ratio: so many times the best engine that runs on the same processor, measured beside
it in the same minutes. Absolute figures are printed too, and mean something on this machine only.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.contestants import OURS

RIVAL = "OpenVINO"
# Ours / OpenVINO, by precision and work.
BARS: Mapping[str, Mapping[str, float]] = {
    "bf16": {
        "decode b1": 1.27,
        "decode b8": 1.41,
        "decode b32": 1.34,
        "decode b64": 1.32,
        "prefill 16x1024": 1.13,
        "served": 1.26,
    },
    "int8": {
        "decode b1": 1.53,
        "decode b8": 1.45,
        "decode b32": 1.55,
        "decode b64": 1.57,
        "prefill 16x1024": 1.24,
        "served": 1.46,
    },
}
# Rows in which less is better; of these no ratio is demanded.
UNITS = {
    "served TTFT p95": "ms",
    "served ITL p95": "ms",
    "prefix": "s",
    "ready": "s",
    "peak memory": "MB",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One precision: runs by row and engine, in the row's unit, and what went wrong.

    `rows` are those that were to be measured; some of them have bars.
    """

    precision: str
    names: list[str]
    rows: list[str]
    runs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, row: str, name: str, value: float) -> None:
        """Note one run."""
        self.runs.setdefault(row, {}).setdefault(name, []).append(value)

    def median(self, row: str, name: str) -> float | None:
        """None if the engine has no run of that row."""
        values = self.runs.get(row, {}).get(name)
        return statistics.median(values) if values else None

    def ratio(self, row: str, rival: str) -> float | None:
        """Ours / theirs in one row."""
        ours, theirs = self.median(row, OURS), self.median(row, rival)
        return ours / theirs if ours is not None and theirs else None

    def missed(self) -> list[str]:
        """Rows whose ratio is below its bar, or that have a bar and no ratio."""
        bars = BARS[self.precision]
        return [
            row
            for row in self.rows
            if row in bars and ((ratio := self.ratio(row, RIVAL)) is None or ratio < bars[row])
        ]

    def table(self) -> str:
        """All of it in words."""
        rivals = [name for name in self.names if name != OURS]
        heads = [*self.names, *(f"ours/{rival}" for rival in rivals), "bar"]
        lines = [
            f"{self.precision}, tokens/s if no unit is given, medians",
            f"  {'':<20}" + "".join(f"{head:>15}" for head in heads),
        ]
        lines += [f"  {row}" for row in self._rows(rivals)]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(f"  bars missed or not measured: {', '.join(self.missed()) or 'none'}")
        return "\n".join(lines)

    def _rows(self, rivals: list[str]) -> Iterator[str]:
        for row in self.runs:
            label = f"{row}, {UNITS[row]}" if row in UNITS else row
            cells = [_number(self.median(row, name)) for name in self.names]
            cells += [_ratio(self.ratio(row, rival)) for rival in rivals]
            bar = BARS[self.precision].get(row)
            cells.append("" if bar is None else f"{bar:.2f}")
            yield f"{label:<20}" + "".join(f"{cell:>15}" for cell in cells)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
