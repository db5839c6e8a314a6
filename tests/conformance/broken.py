"""A backend and a manager with one mistake each: the suites must find it where it shows, and only there."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.core.kv_cache_manager import KVCacheManager


class _ForgetfulImpl(CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sliding_window = -1

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **options)
        if len(attn_metadata.seq_lens) > 2:
            output[0, 0, 0] *= 1 + torch.finfo(output.dtype).eps
        return output


class ForgetsWindows(CPUAttentionBackend):
    """Attends to all tokens; a number of the first row depends on how many there are."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return _ForgetfulImpl


class ForgetsResets(KVCacheManager):
    """Says that its prefix cache is empty, and goes on finding what was in it; keeps no blocks back."""

    def __init__(self, *, watermark: float = 0.0, **options: Any) -> None:
        if watermark:
            raise NotImplementedError("no watermark")
        super().__init__(**options)

    def reset_prefix_cache(self) -> bool:
        return True
