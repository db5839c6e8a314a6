"""Attention metadata of one step for ROSE's layers, built from vLLM's description of the batch."""

from __future__ import annotations

import dataclasses
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
from rose_backend.kernels.attention.ops import MAX_QUERY_LEN
from rose_backend.kernels.gpu_properties import is_recording
from rose_backend.layers.attention import AttentionRows, AttentionStep
from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.attention.flash_attention import FlashRows, choose_rows, uses_flash_attention
from rose_backend.vllm_plugin.attention.mixed_graphs import (
    captures_mixed_steps,
    why_drafter_needs_vllms_graphs,
    why_prompts_need_python,
)
from rose_backend.vllm_plugin.options import has_head, replays_steps, rose_options
from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.pending_kernels import wait_for_kernels

_USUAL_PREFILL_LEN = 256
"""Tokens of a chunk that prefill attention of mixed steps is tuned for when its graph is captured."""


@dataclass(slots=True)
class RoseAttentionMetadata:
    """One step. Rows are requests, decodes first. A row with negative computed tokens is skipped: padding, or a row of
    the other kind. A row without query tokens is skipped, too, if ``max_decode_query_len`` is above 1.

    A graph captured with it is replayed for other steps, so tensors that kernels read keep their addresses. In a graph
    of mixed steps decode and prefill attention both go through all rows, and each finds its own when the graph runs.
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
    seq_lens: torch.Tensor  # [R] int32, vLLM's, which counts them up between a drafter's steps
    decode_computed_tokens: torch.Tensor  # [R] int32
    prefill_computed_tokens: torch.Tensor  # [R] int32
    block_table: torch.Tensor  # [R, MB] int32
    slot_mapping: torch.Tensor  # [T] int64
    prefill_start_loc: torch.Tensor  # [R - first_prefill_row + 1] int32, counted from the first prefill token
    mean_prefill_len: float | None = None
    """Prompt tokens of a row to choose tiles for; None computes it from this step."""
    flash_rows: FlashRows | None = None
    """The prefill rows, where layers with plain attention leave them to FlashAttention 3. Never in a captured graph."""
    steps: dict[bool, AttentionStep] = field(default_factory=dict)
    """This step as ``layers.attention`` takes it, by whether attention stores the new K/V itself: in the model's layers
    it may, while a drafter's, which see the same step, never do."""

    @property
    def decodes_only(self) -> bool:
        """Whether all rows decode, each with a token and its drafts."""
        return self.num_prefill_tokens == 0

    @property
    def is_first_run(self) -> bool:
        """Whether this is the run before a capture of mixed steps, in which every kernel variant is compiled."""
        return self.mean_prefill_len is not None and (
            is_recording() or not torch.cuda.is_current_stream_capturing()
        )

    def prefill_lens_to_tune_for(self) -> tuple[float | None, ...]:
        """Return the mean prefill lengths that prefill attention runs with, None for that of the step itself.

        vLLM runs a step once before it captures its graph. That run uses all tuned lengths, so that every kernel
        variant is compiled before serving.
        """
        if not self.is_first_run:
            return (self.mean_prefill_len,)
        from rose_backend.kernels.tuning.choices import TUNED_QUERY_LENS

        return (*TUNED_QUERY_LENS, self.mean_prefill_len)

    def for_layers(self, *, appends: bool) -> AttentionStep:
        """Return the step, made by the first layer that asks.

        Args:
            appends: whether attention stores the new K/V itself.
        """
        if (step := self.steps.get(appends)) is not None:
            return step
        decode, prefill = None, None
        if self.num_decodes:
            rows, is_single = slice(0, self.num_decodes), self.max_decode_query_len == 1
            decode = AttentionRows[DecodePlan](
                slice(0, self.num_decode_tokens),
                self.block_table[rows],
                self.decode_computed_tokens[rows],
                None if is_single else self.query_start_loc[: self.num_decodes + 1],
                self.max_decode_query_len,
            )
        if self.num_prefill_tokens:
            rows = slice(self.first_prefill_row, None)
            prefill = AttentionRows[PrefillPlan](
                slice(self.num_actual_tokens - self.num_prefill_tokens, self.num_actual_tokens),
                self.block_table[rows],
                self.prefill_computed_tokens[rows],
                self.prefill_start_loc,
            )
        slots = None if appends else self.slot_mapping[: self.num_actual_tokens]
        self.steps[appends] = step = AttentionStep(decode, prefill, slots)
        return step


class RoseAttentionMetadataBuilder(AttentionMetadataBuilder[RoseAttentionMetadata]):
    """Turns vLLM's description of a step into ``RoseAttentionMetadata`` without waiting for the device."""

    supports_draft_decode_metadata_update = True
    """The steps of a head after its first one are one CUDA graph."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold: int = _decode_query_len(vllm_config)
        # One buffer for all steps: captured graphs hold its address. Each step's kernels run before the next writes it.
        self._computed_tokens = torch.full(  # of decodes, of prefills
            (2, vllm_config.scheduler_config.max_num_seqs), -1, dtype=torch.int32, device=device
        )
        self._has_prefills = False
        if not has_head(vllm_config):
            # Beside other drafters it has not been tried on a GPU.
            self.supports_draft_decode_metadata_update = False
        self._uses_flash = uses_flash_attention(vllm_config)
        if captures_mixed_steps(vllm_config):
            # Here because workers build this before they capture graphs, and only if ROSE is selected.
            apply_patch("decode_graphs")
        if find_unaudited(vllm_config.model_config) is not None:
            apply_patch("prompt_tails_v2" if vllm_config.use_v2_model_runner else "prompt_tails_v1")
        if rose_options(vllm_config).kv_canary != "off":
            apply_patch("kv_canary")
        if replays_steps(vllm_config):
            for name in ("capture", "execution", "sampling", "logprobs", "reload", "wake_up"):
                apply_patch(f"step_graph_{name}")
        if not is_recording():
            # No attention layer launches anything before this.
            wait_for_kernels()

    @property
    def decode_computed_tokens(self) -> torch.Tensor:
        """[MR] int32: what captured graphs of decodes read computed tokens from; -1 in rows without a request."""
        return self._computed_tokens[0]

    def take_computed_tokens(self) -> torch.Tensor:
        """Return the computed tokens that graphs of mixed steps read, [2, MR] int32, of decodes and of prefills.

        The caller writes them.
        """
        self._has_prefills = True
        return self._computed_tokens

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any step on CUDA; beside some drafters decodes only, drafts included where decode attention takes them.

        The torch reference kernels plan on the CPU, so no graph may contain them. Attention alone could be in a graph
        of any step of any model. But vLLM asks for nothing else before it replays prompts, and a model's Python may
        have to run in these.
        """
        if not current_platform.is_cuda():
            return AttentionCGSupport.NEVER
        if (
            why_drafter_needs_vllms_graphs(vllm_config) is None
            and vllm_config.use_v2_model_runner
            and why_prompts_need_python(vllm_config) is None
        ):
            return AttentionCGSupport.ALWAYS
        if _decode_query_len(vllm_config) < max_decode_query_len(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RoseAttentionMetadata:
        """Describe a step whose graph is replayed for others with as many rows and tokens.

        With several tokens in a row allowed, that is any mix of decodes and prefills.
        """
        common = common_attn_metadata
        metadata = self.build(0, common)
        if common.max_query_len <= self.reorder_batch_threshold:
            return metadata
        num_rows, num_tokens = common.num_reqs, common.num_actual_tokens
        return dataclasses.replace(
            metadata,
            num_decodes=num_rows,
            num_decode_tokens=num_rows if self.reorder_batch_threshold == 1 else num_tokens,
            max_decode_query_len=self.reorder_batch_threshold,
            first_prefill_row=0,
            num_prefill_tokens=num_tokens,
            prefill_start_loc=common.query_start_loc,
            mean_prefill_len=min(num_tokens, _USUAL_PREFILL_LEN),
            flash_rows=None,
            steps={},
        )

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
        flash_rows = None
        if num_prefills:
            prefill_start_loc = prefill_start_loc - first_prefill_token
            if self._uses_flash:
                flash_rows = choose_rows(common, first_prefill_row, first_prefill_token, prefill_start_loc)
        decode_computed_tokens, prefill_computed_tokens = self._count_computed_tokens(
            common, num_decodes, first_prefill_row
        )
        return RoseAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes if max_query_len == 1 else first_prefill_token,
            max_decode_query_len=max_query_len,
            first_prefill_row=first_prefill_row,
            num_prefill_tokens=num_prefill_tokens,
            query_start_loc=start_loc,
            seq_lens=common.seq_lens,
            decode_computed_tokens=decode_computed_tokens,
            prefill_computed_tokens=prefill_computed_tokens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            prefill_start_loc=prefill_start_loc,
            flash_rows=flash_rows,
        )

    def update_draft_decode_metadata(self, metadata: RoseAttentionMetadata) -> None:
        """Take the lengths that a drafter's step has now, of the same tokens in each row. A graph may contain this."""
        starts = metadata.query_start_loc
        query_lens = 1 if metadata.max_decode_query_len == 1 else starts[1:] - starts[:-1]
        torch.sub(metadata.seq_lens, query_lens, out=metadata.decode_computed_tokens)
        # What layers share was planned for other lengths.
        metadata.steps.clear()

    def _count_computed_tokens(
        self, common: CommonAttentionMetadata, num_decodes: int, first_prefill_row: int
    ) -> torch.Tensor:
        """Return [2, R], of decodes and of prefills, negative where a row is of the other kind.

        vLLM pads rows with length 0; a kernel would take that for a request whose first token is due, unless the row
        has no query tokens.
        """
        seq_lens = common.seq_lens
        num_rows = seq_lens.shape[0]
        computed_tokens = self._computed_tokens[:, :num_rows]
        # As few operations as possible where no row has a prompt: small batches wait for the CPU.
        decodes_only = first_prefill_row == common.num_reqs
        if decodes_only and self._has_prefills:
            self._computed_tokens[1].fill_(-1)
            self._has_prefills = False
        if common.max_query_len <= 1:
            torch.sub(seq_lens, 1, out=computed_tokens[0])
            return computed_tokens
        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        if decodes_only:
            # Padding rows get 0, not -1: kernels skip them because they have no query tokens.
            torch.sub(seq_lens, query_lens, out=computed_tokens[0])
            return computed_tokens
        self._has_prefills = True
        num_computed = seq_lens - query_lens
        if self.reorder_batch_threshold > 1:
            num_computed.masked_fill_(query_lens == 0, -1)
        self._computed_tokens.fill_(-1)
        computed_tokens[0, :num_decodes] = num_computed[:num_decodes]
        computed_tokens[1, first_prefill_row:] = num_computed[first_prefill_row:]
        return computed_tokens


def _decode_query_len(vllm_config: Any) -> int:
    """Return up to how many tokens a row may have to count as a decode: all drafts of a request, or 1."""
    wanted = max_decode_query_len(vllm_config)
    return int(wanted) if wanted <= MAX_QUERY_LEN else 1
