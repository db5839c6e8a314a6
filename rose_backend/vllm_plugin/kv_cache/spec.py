"""What layers ask of the KV cache: specifications of those that Rose attends to, and of those that keep states.

Workers send specifications to the engine core, so their type tells which backend a layer really got. vLLM's spec
registry finds managers by base class, so the subclass needs no entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from rose_backend.vllm_plugin.options import first_reason, uses_rose_manager, why_windows_are_kept
from rose_backend.vllm_plugin.plugin_logger import log_once
from rose_backend.vllm_plugin.registration import BACKEND_NAME

OwnSpec = Callable[[Any, VllmConfig], KVCacheSpec | None]


@dataclass(frozen=True, kw_only=True)
class RoseAttentionSpec(FullAttentionSpec):
    """Attention by ROSE over K/V that is kept whole. Same fields, same bytes as full attention.

    A layer with a sliding window has none here: its window hides keys from its queries, the blocks stay.
    """


def as_rose_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return a full-attention specification as Rose's; every other specification unchanged."""
    if type(spec) is not FullAttentionSpec:
        return spec
    return RoseAttentionSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def wrap_get_kv_cache_spec(original: OwnSpec) -> OwnSpec:
    """Build the replacement of ``Attention.get_kv_cache_spec``; see the patch ledger.

    Where Rose's block manager cannot keep windows in separate KV cache groups, every layer keeps all its K/V in one
    group, including a drafter's layers, whatever their backend is.
    """

    def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = original(self, vllm_config)
        if type(spec) is not SlidingWindowSpec or not uses_rose_manager(vllm_config):
            return spec
        reason = why_kept_whole(vllm_config, original)
        if _speaks_for_the_others(self, vllm_config):
            log_once(describe_windows(vllm_config, original, reason))
        return spec if reason is None else _kept_whole(spec, vllm_config.cache_config.block_size)

    return get_kv_cache_spec


def wrap_get_state_spec(original: OwnSpec) -> OwnSpec:
    """Build the replacement of ``MambaMixer2.get_kv_cache_spec``; see the patch ledger."""

    def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = original(self, vllm_config)
        if not isinstance(spec, MambaSpec) or not uses_rose_manager(vllm_config):
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    return get_kv_cache_spec


def why_kept_whole(vllm_config: VllmConfig, own_spec: OwnSpec) -> str | None:
    """Return why the K/V of this model's sliding windows is kept whole; None if it is not.

    Args:
        own_spec: vLLM's own ``get_kv_cache_spec`` of a layer.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return why_windows_are_kept(vllm_config) or "--disable-hybrid-kv-cache-manager"
    layers = _attention_layers(vllm_config)
    specs = [spec for layer in layers if (spec := own_spec(layer, vllm_config)) is not None]
    windows = [spec.sliding_window for spec in specs if type(spec) is SlidingWindowSpec]
    reasons = {
        "other layers than attention with a KV cache": not all(
            type(spec) in (FullAttentionSpec, RoseAttentionSpec, SlidingWindowSpec) for spec in specs
        ),
        "no layers without a window": len(windows) == len(specs),
        "another attention backend": not all(
            layer.attn_backend.get_name() == BACKEND_NAME for layer in layers if layer.sliding_window is None
        ),
        "windows that max_model_len does not fill": max(windows, default=0)
        >= vllm_config.model_config.max_model_len,
        "layers of several shapes": len({(spec.block_size, spec.page_size_bytes) for spec in specs}) > 1,
        "layers that share K/V": any(layer.kv_sharing_target_layer_name is not None for layer in layers),
    }
    return first_reason(reasons)


def _attention_layers(vllm_config: VllmConfig) -> list[Any]:
    from vllm.model_executor.layers.attention import Attention

    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, Attention)]


def _speaks_for_the_others(layer: Any, vllm_config: VllmConfig) -> bool:
    """Whether a layer is the first one with a window, on the first rank of those that have the same layers."""
    parallel_config = vllm_config.parallel_config
    windowed = (one for one in _attention_layers(vllm_config) if one.sliding_window is not None)
    return next(windowed, None) is layer and parallel_config.rank % parallel_config.tensor_parallel_size == 0


def _kept_whole(spec: SlidingWindowSpec, block_size: int) -> FullAttentionSpec:
    """Return what the layer would ask for without its window; its backend makes its own of it."""
    same = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
    # Another block size, and a page that is filled up to other layers' pages, are for separate groups.
    return FullAttentionSpec(**{**same, "block_size": block_size, "page_size_padded": None})


def describe_windows(vllm_config: VllmConfig, own_spec: OwnSpec, reason: str | None) -> str:
    """Return the line at start-up that says whether the K/V of windows is kept whole, and what that costs.

    Counted are blocks that one request of the longest length holds while it generates, over the layers of this worker.
    Of a window in its own group these are the blocks that it reaches; it may begin inside one.

    Args:
        own_spec: vLLM's own ``get_kv_cache_spec`` of a layer.
        reason: why it is kept whole; None if it is not.
    """
    max_model_len, block_size = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    num_blocks = -(-max_model_len // block_size)
    whole = windowed = num_layers = 0
    windows = []
    for layer in _attention_layers(vllm_config):
        spec = own_spec(layer, vllm_config)
        if not isinstance(spec, AttentionSpec) or layer.kv_sharing_target_layer_name is not None:
            continue
        num_layers += 1
        block_bytes = block_size * spec.real_page_size_bytes // spec.block_size
        whole += num_blocks * block_bytes
        num_held = num_blocks
        if type(spec) is SlidingWindowSpec:
            windows.append(spec.sliding_window)
            num_held = min(-(-(spec.sliding_window - 1) // block_size) + 1, num_blocks)
        windowed += num_held * block_bytes
    sizes = " and ".join(f"{window:,}" for window in sorted(set(windows)))
    if reason is None:
        return (
            f"Rose's block manager releases what sliding windows have passed ({len(windows)} of {num_layers} layers, "
            f"windows of {sizes} tokens): a request of max_model_len {max_model_len:,} holds "
            f"{windowed / 2**20:,.1f} MiB, {whole / windowed:.1f} times less than if it were kept"
        )
    return (
        f"Rose's block manager keeps the K/V of sliding windows whole ({len(windows)} of {num_layers} layers, windows "
        f"of {sizes} tokens; reason: {reason}): a request of max_model_len {max_model_len:,} holds "
        f"{whole / 2**20:,.1f} MiB, {whole / windowed:.1f} times as much as with vLLM's own block manager"
    )


def is_rose_group(spec: Any) -> bool:
    """Whether all layers of a KV cache group keep their K/V whole, at least one with ROSE.

    The others belong to a draft model, whose attention backend vLLM chooses itself.
    """
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(map(_is_kept_whole, specs)) and any(isinstance(one, RoseAttentionSpec) for one in specs)


def _is_kept_whole(spec: Any) -> bool:
    return (
        type(spec) in (FullAttentionSpec, RoseAttentionSpec)
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


def wrap_copy_kv_cache_blocks(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``copy_kv_cache_blocks_inplace``; see the patch ledger.

    Groups share blocks, so layers of several groups begin at one address, and vLLM copies each address once.
    """

    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Sequence[Any]
    ) -> None:
        widest_first = sorted(kv_caches, key=lambda cache: cache.nbytes, reverse=True)
        original(widest_first, num_blocks, kv_cache_block_copies)

    return copy_kv_cache_blocks_inplace
