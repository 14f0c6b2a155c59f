"""Tables of rich."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting a cell: what goes to a file or a pipe is as wide as it needs."""
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(width=10_000, max_width=10_000), table).maximum
        if needed > console.width:
            console.width = needed
    console.print(table)
