"""One step as ROSE's attention layers see it, built from vLLM's description of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from rose_backend.kernels import DecodePlan, PrefillPlan


@dataclass(slots=True)
class RoseAttentionMetadata:
    """One step. Rows are requests, decodes first; padding rows have a negative ``num_computed_tokens``."""

    num_actual_tokens: int
    num_decodes: int
    """Rows with exactly one query token, which are also the first ``num_decodes`` tokens."""
    first_prefill_row: int
    num_prefill_tokens: int
    prefill_start_loc: torch.Tensor  # [R - first_prefill_row + 1] int32, counted from the first prefill token
    num_computed_tokens: torch.Tensor  # [R] int32
    block_table: torch.Tensor  # [R, MB] int32
    slot_mapping: torch.Tensor  # [T] int64
    decode_plans: dict[int | None, DecodePlan | None] = field(default_factory=dict)
    """By sliding window. Made by the first layer that needs one, shared by the others."""
    prefill_plans: dict[int | None, PrefillPlan | None] = field(default_factory=dict)


class RoseAttentionMetadataBuilder(AttentionMetadataBuilder[RoseAttentionMetadata]):
    """Turns vLLM's description of a step into ``RoseAttentionMetadata`` without waiting for the device."""

    # The torch twins of the kernels plan on the host, so no graph may contain them. Layers in between still replay.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RoseAttentionMetadata:
        """Split the batch into decodes and prefills, and mark padding rows."""
        common = common_attn_metadata
        num_decodes, _, num_decode_tokens, num_prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=1
        )
        start_loc = common.query_start_loc
        query_lens = start_loc[1:] - start_loc[:-1]
        # vLLM pads rows with length 0; a kernel would take that for a request whose first token is due.
        num_computed = torch.where(query_lens > 0, common.seq_lens - query_lens, -1)
        # Rows without a token come last among the decodes, so the rows that remain are as many as the tokens.
        return RoseAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=min(num_decodes, num_decode_tokens),
            first_prefill_row=num_decodes,
            num_prefill_tokens=num_prefill_tokens,
            prefill_start_loc=start_loc[num_decodes:] - num_decode_tokens,
            num_computed_tokens=num_computed,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
