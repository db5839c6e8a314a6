"""Which of the switchable parts are really at work, and if not, why. Needs neither torch nor a model."""

from __future__ import annotations

from rose_backend.config import SWITCH_NAMES, Switches

_KERNEL_PARTS = ("fused_kv_append", "fused_mlp", "fused_sampler", "fused_add_layernorm")


def parts_in_force(config: Switches, device: str) -> dict[str, str]:
    """Describe every switch.

    Args:
        config: the switches asked for.
        device: "cpu" or "cuda".

    Returns:
        Switch name to "on", "off", "on (...)" with what it runs on, or "not in force (...)" with the reason.
    """
    return {name: _describe(name, getattr(config, name), device) for name in SWITCH_NAMES}


def _describe(name: str, is_on: bool, device: str) -> str:
    if not is_on:
        return "off"
    if name == "cuda_graph":
        return (
            "not in force (no captured path yet)"
            if device == "cuda"
            else f"not in force (device is {device})"
        )
    if name in _KERNEL_PARTS:
        return "on (PyTorch operations)"
    return "on"
