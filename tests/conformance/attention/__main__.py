"""``python -m tests.conformance.attention`` prints where backends differ from the definition."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.conformance.attention.differences import DIFFERENCES

if __name__ == "__main__":
    table = Table("Backend", "What", title="Backends that differ from attention by the definition")
    for entry in DIFFERENCES:
        table.add_row(entry.backend, entry.what)
    Console().print(table, markup=False)
