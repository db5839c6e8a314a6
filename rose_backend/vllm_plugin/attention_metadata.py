"""One step as ROSE's attention layers see it, built from vLLM's description of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from rose_backend.kernels import DecodePlan, PrefillPlan
from rose_backend.kernels.paged_decode import MAX_QUERY_LEN


@dataclass(slots=True)
class RoseAttentionMetadata:
    """One step. Rows are requests, decodes first; padding rows have a negative ``num_computed_tokens``.

    A graph captured with it is replayed for other steps: tensors that decodes read keep their addresses.
    """

    num_actual_tokens: int
    num_decodes: int
    """Rows with few query tokens, at most ``max_decode_query_len``, which are also the first tokens."""
    num_decode_tokens: int
    max_decode_query_len: int
    """1: decode rows and decode tokens are the same."""
    first_prefill_row: int
    num_prefill_tokens: int
    query_start_loc: torch.Tensor  # [R + 1] int32
    num_computed_tokens: torch.Tensor  # [R] int32
    block_table: torch.Tensor  # [R, MB] int32
    slot_mapping: torch.Tensor  # [T] int64
    prefill_start_loc: torch.Tensor  # [R - first_prefill_row + 1] int32, counted from the first prefill token
    decode_plans: dict[int | None, DecodePlan | None] = field(default_factory=dict)
    """By sliding window. Made by the first layer that needs one, shared by the others."""
    prefill_plans: dict[int | None, PrefillPlan | None] = field(default_factory=dict)


class RoseAttentionMetadataBuilder(AttentionMetadataBuilder[RoseAttentionMetadata]):
    """Turns vLLM's description of a step into ``RoseAttentionMetadata`` without waiting for the device."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold: int = _decode_query_len(vllm_config)
        # One buffer for all steps: captured graphs hold its address. Each step's kernels run before the next writes it.
        self._num_computed_tokens = torch.empty(
            vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decodes on CUDA, drafts included where decode attention takes them.

        The torch twins of the kernels plan on the host, so no graph may contain them.
        """
        if not current_platform.is_cuda():
            return AttentionCGSupport.NEVER
        if _decode_query_len(vllm_config) < max_decode_query_len(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RoseAttentionMetadata:
        """Split the batch into decodes and prefills, and mark padding rows."""
        common = common_attn_metadata
        first_prefill_row, num_prefills, first_prefill_token, num_prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        max_query_len = 1 if common.max_query_len <= 1 else self.reorder_batch_threshold
        # Rows without a token come last among the decodes: at most as many as there are tokens have one.
        num_decodes = min(first_prefill_row, first_prefill_token)
        start_loc = common.query_start_loc
        prefill_start_loc = start_loc[first_prefill_row:]
        if num_prefills:
            prefill_start_loc = prefill_start_loc - first_prefill_token
        return RoseAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes if max_query_len == 1 else first_prefill_token,
            max_decode_query_len=max_query_len,
            first_prefill_row=first_prefill_row,
            num_prefill_tokens=num_prefill_tokens,
            query_start_loc=start_loc,
            num_computed_tokens=self._count_computed_tokens(common),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            prefill_start_loc=prefill_start_loc,
        )

    def _count_computed_tokens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return [R]. vLLM pads rows with length 0; a kernel would take that for a request whose first token is due."""
        seq_lens = common.seq_lens
        num_computed = self._num_computed_tokens[: seq_lens.shape[0]]
        if common.max_query_len <= 1:
            # One operation instead of four: small batches wait for the host.
            return torch.sub(seq_lens, 1, out=num_computed)
        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        torch.sub(seq_lens, query_lens, out=num_computed)
        return num_computed.masked_fill_(query_lens == 0, -1)


def _decode_query_len(vllm_config: Any) -> int:
    """Return up to how many tokens a row may have to count as a decode: all drafts of a request, or 1."""
    wanted = max_decode_query_len(vllm_config)
    return int(wanted) if wanted <= MAX_QUERY_LEN else 1
