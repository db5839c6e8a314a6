"""The KV cache specification of layers that Rose attends to.

Workers send specifications to the engine core, so their type tells which backend a layer really got. vLLM's spec
registry finds managers by base class, hence the subclass needs no entry of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.options import HAND_BACK_OPTION

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, kw_only=True)
class RoseAttentionSpec(FullAttentionSpec):
    """Full attention by ROSE. Same fields, same bytes."""


def as_rose_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return a full-attention specification as Rose's; every other kind unchanged."""
    if type(spec) is not FullAttentionSpec:
        return spec
    return RoseAttentionSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def the_rose_group(kv_cache_config: KVCacheConfig) -> KVCacheGroupSpec:
    """Return the only KV cache group of a model that Rose's block manager supports.

    Raises:
        ConfigError: names what the model has instead.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not is_rose_group(groups[0].kv_cache_spec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigError(
            f"Rose's block manager serves one KV cache group of full ROSE attention, this model has {kinds}; "
            f"{HAND_BACK_OPTION} gives block management back to vLLM"
        )
    return groups[0]


def is_rose_group(spec: Any) -> bool:
    """Whether all layers of a KV cache group are full attention, at least one with ROSE.

    The others belong to a draft model, whose attention backend vLLM chooses itself.
    """
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(map(_is_full_attention, specs)) and any(isinstance(one, RoseAttentionSpec) for one in specs)


def _is_full_attention(spec: Any) -> bool:
    return (
        type(spec) in (FullAttentionSpec, RoseAttentionSpec)
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


def block_bytes(group: KVCacheGroupSpec) -> int:
    """Return the bytes of one block over all layers of a group, keys and values, on one worker."""
    spec = group.kv_cache_spec
    num_layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return num_layers * int(spec.page_size_bytes)


def check_pool_size(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Refuse a pool that can never hold one sequence of the longest length.

    Raises:
        ConfigError: names both numbers.
    """
    # Block 0 is the null block.
    usable, needed = num_blocks - 1, -(-max_model_len // block_size)
    if usable < needed:
        raise ConfigError(
            f"KV cache pool: {usable} usable blocks of {block_size} tokens cannot hold one sequence of max_model_len "
            f"{max_model_len} ({needed} blocks); give it more memory or blocks, or lower --max-model-len"
        )
