"""Prints rows: a table for people, tab-separated lines for programs."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """To standard output; programs get no heading."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
