"""HOW are rows printed? A table for a terminal, tab-separated lines for everything else.

Called by the verbs that list things. Must never cut a value in a pipe.
"""

import sys
from collections.abc import Iterable, Sequence


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """One line a row."""
    if not sys.stdout.isatty():
        for row in [headers, *rows]:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as it is: a name may have brackets
    Console().print(table)
