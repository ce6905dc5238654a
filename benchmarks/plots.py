"""Draws the results of `compare` for the documents: one picture for each precision.

Every engine's rates are drawn as multiples of the rival's, since only ratios carry from one
machine to another; short lines mark our bars, and the figures above the bars are tokens per
second on the machine that is named. matplotlib draws, if it is installed.
"""

import json
import statistics
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.comparison import BARS, RIVAL

MATPLOTLIB = "matplotlib==3.11.2"
_COLOURS = ("#0b6e99", "#b0b7bd", "#d8a657", "#8f6f9e", "#7a8f5a")
_WIDTH = 0.8


class NothingToDraw(ValueError):
    """The file does not hold results that can be drawn; the message says why."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Medians in tokens per second, by engine and row; None where there is none."""

    precision: str
    machine: str
    rows: list[str]
    medians: dict[str, list[float | None]]

    def ratios(self, name: str) -> list[float]:
        """The engine's rates as multiples of the rival's; 0 where there is none."""
        rival = self.medians[RIVAL]
        return [
            one / other if one is not None and other else 0.0
            for one, other in zip(self.medians[name], rival, strict=True)
        ]


def charts_of(file: Path) -> list[Chart]:
    """The charts of a results file of `compare`. Raises NothingToDraw."""
    document = json.loads(file.read_text(encoding="utf-8"))
    if document.get("benchmark") != "compare":
        raise NothingToDraw(f"{file} holds no results of compare.")
    charts = [_chart(one, document["machine"]["cpu"]) for one in document["results"]]
    drawable = [chart for chart in charts if chart.rows and RIVAL in chart.medians]
    if not drawable:
        raise NothingToDraw(f"{file} holds no row that {RIVAL} ran as well.")
    return drawable


def draw(chart: Chart, picture: Path) -> None:
    """Write a chart as PNG. Raises ModuleNotFoundError without matplotlib."""
    import_module("matplotlib").use("Agg")
    figure, axes = import_module("matplotlib.pyplot").subplots(figsize=(10, 4.2), dpi=120)
    width = _WIDTH / len(chart.medians)
    for number, (name, medians) in enumerate(chart.medians.items()):
        places = [row + (number + 0.5) * width - _WIDTH / 2 for row in range(len(chart.rows))]
        colour = _COLOURS[number % len(_COLOURS)]
        bars = axes.bar(places, chart.ratios(name), width, label=name, color=colour)
        labels = ["" if value is None else f"{value:,.0f}" for value in medians]
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    for row, name in enumerate(chart.rows):
        demanded = BARS[chart.precision].get(name)
        if demanded is not None:
            axes.hlines(demanded, row - _WIDTH / 2, row - _WIDTH / 2 + width, "black", lw=2)
    axes.set_xticks(range(len(chart.rows)), chart.rows)
    axes.set_ylabel(f"times {RIVAL}")
    axes.set_title(f"{chart.precision} on {chart.machine}; tokens/s above, bars as lines")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.09)}
    axes.legend(frameon=False, ncols=len(chart.medians), fontsize=8, **below)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(picture)


def main(file: Path, folder: Path) -> list[Path]:
    """Draw all charts of a results file into a folder; returns the pictures."""
    pictures = []
    for chart in charts_of(file):
        pictures.append(folder / f"compare-{chart.precision}.png")
        draw(chart, pictures[-1])
    return pictures


def _chart(comparison: dict[str, object], machine: str) -> Chart:
    precision, names, runs = (comparison[key] for key in ("precision", "names", "runs"))
    assert isinstance(precision, str)
    assert isinstance(names, list)
    assert isinstance(runs, dict)
    rows = [row for row in BARS[precision] if RIVAL in runs.get(row, {})]
    medians: dict[str, list[float | None]] = {
        name: [statistics.median(runs[row][name]) if name in runs[row] else None for row in rows]
        for name in names
    }
    return Chart(precision, machine, rows, medians)
