"""Plug-in of pytest: a run ends with what the kernels take that it compiled ahead of time."""

from __future__ import annotations

import sys
from typing import Any

import pytest

_ROWS: list[Any] = []
"""Of the table: what this process compiled, and under pytest-xdist what its workers did."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note the rows of this process; a worker hands them to the process that prints."""
    # Of a run without kernels' tests the report costs no import.
    if aot := sys.modules.get("tests.support.aot"):
        from tests.support.resource_table import resource_rows

        _ROWS.extend(resource_rows(aot.COMPILED))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernel_resources"] = _ROWS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the rows of a worker that ends; one that crashed has none."""
    _ROWS.extend(getattr(node, "workeroutput", {}).get("kernel_resources", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table behind everything else."""
    if _ROWS:
        from rich.console import Console

        from tests.support.resource_table import resource_table

        console = Console(width=160, no_color=True)
        with console.capture() as capture:
            console.print(resource_table(_ROWS))
        terminalreporter.write_line(capture.get())
