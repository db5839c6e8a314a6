"""Prints what the kernels that a run compiled ahead of time take."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.support import aot
from tests.support.resource_table import resource_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table behind everything else."""
    if aot.COMPILED:
        console = Console(width=160, no_color=True)
        with console.capture() as capture:
            console.print(resource_table(aot.COMPILED))
        terminalreporter.write_line(capture.get())
