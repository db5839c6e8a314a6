"""Makes the CPU platform honour ``ROSE``. CUDA does so by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.backend_name import is_rose


def wrap_get_attn_backend_cls(original: Callable[..., str]) -> Callable[..., str]:
    """Build the replacement of ``CpuPlatform.get_attn_backend_cls``; see the patch ledger."""

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if not is_rose(selected_backend):
            return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ConfigError(
                f"--attention-backend {selected_backend.name} does not support this model or setting: "
                f"{', '.join(reasons)}; choose another attention backend"
            )
        path: str = selected_backend.get_path()
        return path

    return get_attn_backend_cls
