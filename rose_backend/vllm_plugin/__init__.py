"""Rose inside a vLLM server: ``vllm serve MODEL --attention-backend rose``.

vLLM calls ``register`` in every process through the entry point group ``vllm.general_plugins``, for every model and
backend. It adds the backend name ROSE and hooks that do nothing unless ROSE is selected. See ``README.md`` in this
folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.plugin_logger import log_once, logger
from rose_backend.vllm_plugin.registration import (
    SUPPORTED_VERSIONS,
    ensure_backend_name,
    installed_vllm_version,
    is_supported,
)


def register() -> None:
    """Add ROSE to this process's vLLM. Cheap and idempotent, in any order of calls.

    With a vLLM outside the supported range nothing is changed but one line logged, and vLLM refuses
    ``--attention-backend rose`` as unknown.
    """
    version = installed_vllm_version()
    if not is_supported(version):
        log_once(
            f"rose_backend stays off: it supports vLLM {SUPPORTED_VERSIONS}, this is {version}. "
            "--attention-backend rose is not available; everything else is vLLM's own.",
            logging.WARNING,
        )
        return
    # ROSE does not run correctly without these two, so the name is not registered without them.
    if (
        _succeeds("config_hook", partial(apply_patch, "finish_config"))
        and _succeeds("cpu_platform", _register_cpu_platform)
        and ensure_backend_name() is not None
    ):
        _succeeds("models", _register_models)
        for name in ("sampler_v1", "sampler_v2"):
            _succeeds(name, partial(apply_patch, name))


def _succeeds(part: str, register_part: Callable[[], None]) -> bool:
    # vLLM does not catch what a plugin raises, and this one is loaded for every model: one broken part must not
    # take down a server that may not even use it.
    try:
        register_part()
    except Exception:
        logger.exception("rose_backend could not register its %s with this vLLM; that part is off", part)
        return False
    return True


def _register_cpu_platform() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        apply_patch("cpu_backend_choice")


def _register_models() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from rose_backend.vllm_plugin.models.model_choice import MODEL_CLASSES

    for architecture, class_path in MODEL_CLASSES.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, class_path)
