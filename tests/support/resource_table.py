"""The table of what compiled kernels take: registers, shared memory and spills, by configuration and capability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.table import Table

from tests.support.aot import CAPABILITIES, Launch, Resources

# Programmatic dependent launch is chosen by the capability, and what is prefetched with it.
_CHOSEN_BY_CAPABILITY = ("PDL", "launch_pdl", "PREFETCH")


Row = tuple[str, dict[str, Any], int, str]
"""Kernel, configuration, capability, resources in words: plain values, which travel between processes."""


def resource_rows(compiled: Iterable[tuple[Launch, int, Resources]]) -> list[Row]:
    """Return what the table says of each compilation."""
    return [
        (launch.kernel.__name__, configuration(launch), capability, cell(resources))
        for launch, capability, resources in compiled
    ]


def resource_table(rows: Iterable[Row]) -> Table:
    """Return one row per kernel and configuration, one column per capability.

    Of a configuration only what differs among the kernel's own is named.
    """
    table = Table(
        "kernel", "configuration", title="Kernels compiled ahead of time, per thread and per program"
    )
    for capability in CAPABILITIES:
        table.add_column(f"sm_{capability}", justify="right", no_wrap=True)
    kernels: dict[str, list[Row]] = {}
    for row in rows:
        kernels.setdefault(row[0], []).append(row)
    for name, entries in sorted(kernels.items()):
        varying = _varying([settings for _, settings, _, _ in entries])
        cells: dict[str, dict[int, str]] = {}
        for _, settings, capability, resources in entries:
            label = ", ".join(_words(key, settings[key]) for key in varying if settings.get(key))
            cells.setdefault(label, {})[capability] = resources
        for index, (label, by_capability) in enumerate(cells.items()):
            columns = (by_capability.get(capability, "") for capability in CAPABILITIES)
            table.add_row(name if index == 0 else "", label, *columns)
        table.add_section()
    return table


def configuration(launch: Launch) -> dict[str, Any]:
    """Return what a launch was compiled for: type of its first tensor, constants, warps and stages."""
    tensors = (value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    settings: dict[str, Any] = {"dtype": str(next(tensors).dtype).removeprefix("torch.")}
    for param in launch.kernel.params:
        if param.is_constexpr:
            value = launch.arguments.get(param.name, param.default)
            named = value._asdict() if hasattr(value, "_asdict") else {param.name: value}
            settings |= {
                name: each if isinstance(each, bool | int | float | None) else str(each)
                for name, each in named.items()
            }
    return {**settings, **launch.options}


def cell(resources: Resources) -> str:
    """Return the resources on one line."""
    text = f"{resources.registers} regs, {resources.shared_bytes / 1024:.1f} KiB"
    return f"{text}, {resources.spill_bytes} B SPILLED" if resources.spill_bytes else text


def _varying(settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for setting in settings for key in setting)
    varying = (key for key in keys if len({str(setting.get(key)) for setting in settings}) > 1)
    return [key for key in varying if key not in _CHOSEN_BY_CAPABILITY]


def _words(key: str, value: Any) -> str:
    if value is True:
        return key
    return str(value) if key == "dtype" else f"{key} {value}"
