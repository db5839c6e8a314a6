"""Which of the switchable parts are in effect, and why the others are not. Needs neither torch nor a model."""

from __future__ import annotations

from rose_backend.config import SWITCH_NAMES, Switches

_KERNEL_PARTS = ("fused_kv_append", "fused_mlp", "fused_sampler", "fused_add_layernorm")


def feature_status(config: Switches, device: str) -> dict[str, str]:
    """Describe every switch.

    Args:
        config: the switches asked for.
        device: "cpu" or "cuda".

    Returns:
        Switch name to "on", "off", "on (...)" with what it runs on, or "not in force (...)" with the reason.
    """
    return {name: _describe(name, config, device) for name in SWITCH_NAMES}


def _describe(name: str, config: Switches, device: str) -> str:
    if not getattr(config, name):
        return "off"
    if name == "cuda_graph" and not captures_graphs(config, device):
        reason = "fused_sampler is off" if device == "cuda" else f"device is {device}"
        return f"not in force ({reason})"
    if name == "token_granular_hits" and not config.prefix_cache:
        return "not in force (prefix_cache is off)"
    if name in _KERNEL_PARTS:
        return "on (Triton kernels)" if device == "cuda" else "on (PyTorch operations)"
    return "on"


def captures_graphs(config: Switches, device: str) -> bool:
    """Return whether decode steps are captured. The unfused sampler waits for the device, which cannot be captured."""
    return config.cuda_graph and config.fused_sampler and device == "cuda"
