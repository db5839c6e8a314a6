"""``python -m tests.conformance.block_manager`` prints where Rose's block manager and vLLM's differ on purpose."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.conformance.block_manager.differences import DIFFERENCES


def render(width: int | None = None) -> str:
    """Return the table as text, ``width`` characters wide (default: the terminal's)."""
    table = Table("Question", "Rose", "vLLM", "Why", title="Answers that differ on purpose", show_lines=True)
    for entry in DIFFERENCES:
        table.add_row(entry.question, str(entry.rose), str(entry.stock), entry.why)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table, markup=False)
    return capture.get()


if __name__ == "__main__":
    print(render())
