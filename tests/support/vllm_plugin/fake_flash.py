"""FlashAttention 3 as plain torch."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm

from rose_backend.kernels import AttentionOptions
from rose_backend.kernels.attention import reference
from tests.support.attention_calls import paged_prefill


def real_interface() -> ModuleType:
    """Return vLLM's module of FlashAttention's Python functions, without the kernels, which a CPU build lacks."""
    path = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeFlash(ModuleType):
    """FlashAttention's functions as plain torch. Takes exactly the arguments that vLLM's functions take."""

    def __init__(self) -> None:
        super().__init__("vllm.vllm_flash_attn")
        real = real_interface()
        self._attend, self._plan = (
            inspect.signature(function)
            for function in (real.flash_attn_varlen_func, real.get_scheduler_metadata)
        )
        self.calls: list[dict[str, Any]] = []
        self.schedules: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = self._plan.bind(*args, **kwargs)
        bound.apply_defaults()
        self.schedules.append(bound.arguments)
        return torch.tensor([len(self.schedules)])

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = self._attend.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self.calls.append(given)
        query, starts, seq_lens = given["q"], given["cu_seqlens_q"], given["seqused_k"]
        assert (
            given["causal"]
            and given["fa_version"] == 3
            and given["window_size"] in (None, [-1, -1], (-1, -1))
        )
        query_lens = starts.diff()
        assert given["max_seqlen_q"] >= query_lens.max() and given["max_seqlen_k"] >= seq_lens.max()
        for name in ("cu_seqlens_q", "seqused_k", "block_table"):
            assert given[name].dtype == torch.int32 and given[name].stride(-1) == 1
        for name in ("q", "k", "v", "out"):
            *strides, last = given[name].stride()
            assert last == 1 and all(stride % 8 == 0 for stride in strides), "the copy engine takes 16 bytes"
        return paged_prefill(
            query,
            None,
            None,
            given["k"],
            given["v"],
            given["block_table"],
            starts,
            seq_lens - query_lens,
            launch=reference.paged_prefill,
            options=AttentionOptions(given["softmax_scale"]),
            out=given["out"],
        )
