"""Prints rows: tab-separated lines for programs, and for people a table, or, where the terminal
is too narrow for it, a block of lines for each row. Nothing is ever cut.
"""

import shutil
import sys
from collections.abc import Sequence

from rich.cells import cell_len

_GAP = "  "


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """To standard output, with the columns' names."""
    if sys.stdout.isatty():
        lines = lay_out(columns, rows, shutil.get_terminal_size().columns)
    else:
        lines = ["\t".join(row) for row in (columns, *rows)]
    for line in lines:
        print(line)


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines for a terminal of that width."""
    table = _aligned([columns, *rows])
    if not rows or max(map(cell_len, table)) <= width:
        return table
    blocks = [_aligned(list(zip(columns, row, strict=True))) for row in rows]
    return [line for block in blocks for line in (*block, "")]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
