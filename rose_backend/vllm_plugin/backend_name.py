"""The name ``ROSE`` among vLLM's attention backends, in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose_backend.vllm_plugin.plugin_logger import logger

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND_NAME = "ROSE"
BACKEND_CLASS_PATH = "rose_backend.vllm_plugin.attention.backend.RoseAttentionBackend"


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
    # a reducer of its own, a member that was added at run time is unknown there. This changes Rose's member only.
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
