"""The table of what compiled kernels take: registers, shared memory and spills, by configuration and capability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.table import Table

from tests.support.aot import CAPABILITIES, Launch, Resources

# Programmatic dependent launch is chosen by the capability, and what is prefetched with it.
_CHOSEN_BY_CAPABILITY = ("PDL", "launch_pdl", "PREFETCH")


def resource_table(compiled: Iterable[tuple[Launch, int, Resources]]) -> Table:
    """Return one row per kernel and configuration, one column per capability.

    Of a configuration only what differs among the kernel's own is named.
    """
    table = Table(
        "kernel", "configuration", title="Kernels compiled ahead of time, per thread and per program"
    )
    for capability in CAPABILITIES:
        table.add_column(f"sm_{capability}", justify="right", no_wrap=True)
    kernels: dict[str, list[tuple[Launch, int, Resources]]] = {}
    for launch, capability, resources in compiled:
        kernels.setdefault(launch.kernel.__name__, []).append((launch, capability, resources))
    for name, entries in sorted(kernels.items()):
        varying = _varying([configuration(launch) for launch, _, _ in entries])
        cells: dict[str, dict[int, str]] = {}
        for launch, capability, resources in entries:
            settings = configuration(launch)
            label = ", ".join(_words(key, settings[key]) for key in varying if settings.get(key))
            cells.setdefault(label, {})[capability] = cell(resources)
        for index, (label, row) in enumerate(cells.items()):
            by_capability = (row.get(capability, "") for capability in CAPABILITIES)
            table.add_row(name if index == 0 else "", label, *by_capability)
        table.add_section()
    return table


def configuration(launch: Launch) -> dict[str, Any]:
    """Return what a launch was compiled for: type of its first tensor, constants, warps and stages."""
    tensors = (value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    settings: dict[str, Any] = {"dtype": str(next(tensors).dtype).removeprefix("torch.")}
    for param in launch.kernel.params:
        if param.is_constexpr:
            settings[param.name] = launch.arguments.get(param.name, param.default)
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
