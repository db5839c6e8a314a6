"""The KV cache specification of layers that Rose attends to.

Specifications travel from the workers to the engine core, so their type tells reliably which backend a layer really
got. vLLM's spec registry finds managers by base class, hence the subclass needs no entry of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class RoseAttentionSpec(FullAttentionSpec):
    """Full attention by ROSE. Same fields, same bytes."""


def as_rose_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return a full-attention specification as Rose's; every other kind as it is."""
    if type(spec) is not FullAttentionSpec:
        return spec
    return RoseAttentionSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def is_rose_group(spec: Any) -> bool:
    """Whether all layers of a KV cache group attend with ROSE over their whole history."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(is_rose_group, spec.kv_cache_specs.values()))
    return (
        isinstance(spec, RoseAttentionSpec)
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
    )
