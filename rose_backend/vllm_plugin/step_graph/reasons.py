"""Which engines and steps are replayed whole, and why others are not.

The answers are the same on all ranks of a tensor parallel group, which run every step together. The reasons are log
text: docs/observability.md lists them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.ec_connector import NO_OP_EC_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from rose_backend.kernels.attention.ops import MAX_QUERY_LEN
from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.options import (
    OTHER_DRAFTER,
    first_reason,
    has_connector_in_layers,
    uses_rose_manager,
    why_adapters_need_vllms_steps,
    why_ranks_do_not_replay_together,
)

HEADS = (EagleSpeculator, MTPSpeculator)
"""vLLM's speculators, by exact type, whose passes are graphs as ``head_steps.py`` replays them."""

NUM_LOGITS_PROCESSORS = 3
"""vLLM's own: bias, penalties, bad words."""

_FIELDS_OF_ENCODER_CACHE = ("free_encoder_mm_hashes", "encoder_input_updates")
"""They release encoder outputs that no request needs any more; the second exists from vLLM 0.33 on."""
FIELDS_OF_CHANGED_BATCHES = (
    *("finished_req_ids", "preempted_req_ids", "kv_cache_block_copies"),
    *_FIELDS_OF_ENCODER_CACHE,
)
"""Fields of a scheduler output that need vLLM's own bookkeeping even if the step has the requests of the one before."""
_FIELDS_OF_STEADY_STEPS = (
    *("scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    *("finished_req_ids", "preempted_req_ids"),
    # Grammar masks arrive in sample_tokens, after the layers have been launched.
    *("has_structured_output_requests", "pending_structured_output_tokens"),
    # Handed to the KV connector.
    "kv_connector_metadata",
    *_FIELDS_OF_ENCODER_CACHE,
    # New blocks of attention beside states, and checkpoints of states.
    *("new_block_ids_to_zero", "kv_cache_block_copies"),
    # Not read by workers.
    *("scheduled_encoder_input_stats", "kv_connector_block_state", "num_common_prefix_blocks"),
)
FIELDS_OF_MIXED_STEPS = ("scheduled_new_reqs", "scheduled_encoder_inputs")
"""Further fields that a mixed step may have."""
FIELDS_OF_OTHER_STEPS = tuple(
    each.name
    for each in fields(SchedulerOutput)
    if each.name not in (*_FIELDS_OF_STEADY_STEPS, *FIELDS_OF_MIXED_STEPS)
)
"""All other fields that this vLLM's scheduler outputs have: a step with any of them set is vLLM's."""

_FIELDS_OF_DRAFTS = ("scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule")
REJECTION_METHODS = ("standard", "block", "synthetic")
"""vLLM's ``rejection_sample_method`` values that ends of steps with drafts know."""

STATE_BUILDERS: dict[type, tuple[str, str | None]] = {
    GDNAttentionMetadataBuilder: ("non_spec_state_indices_tensor", "non_spec_query_start_loc"),
    Mamba2AttentionMetadataBuilder: ("state_indices_tensor_d", None),
    ShortConvAttentionMetadataBuilder: ("state_indices_tensor_d", None),
}
"""vLLM's metadata builders of layers with a state, by exact type, with their tensors that graphs of decodes read: the
block of each row's state, the null block in rows of padding, and a copy of the step's ``query_start_loc``."""


def why_engine_is_not_replayed(runner: Any) -> str | None:
    """Return a feature of this engine that replayed steps do not have, so that all steps are vLLM's; None if none.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its attention initialized.
    """
    state, sampler, manager = runner.model_state, runner.sampler, runner.cudagraph_manager
    config = runner.vllm_config
    reasons = {
        "pipeline parallelism": runner.use_pp,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "microbatches": runner.ubatch_runner is not None,
        "pooling": runner.is_pooling_model,
        "a KV connector that works layer by layer": has_connector_in_layers(config),
        "an encoder cache connector": runner.ec_connector is not NO_OP_EC_CONNECTOR,
        "outputs for a connector": runner.aux_output_connector is not None,
        "expert load balancing": config.parallel_config.enable_eplb or runner.check_ep_fault,
        "KV sharing in prefill": runner.fast_prefill is not None,
        "sharded sampling": runner.batch_sharder is not None,
        "graph metrics": config.observability_config.cudagraph_metrics,
        "a model with its own state": type(state) not in (DefaultModelState, MambaHybridModelState)
        or state.prompt_embeds_state is not None
        or state.num_new_sampled_tokens_per_step != 1,
        "another sampler": type(sampler) is not Sampler,
        "no full graphs of decodes": manager is None or not manager._capture_descs.get(CUDAGraphMode.FULL),
    }
    return (
        _why_drafts_need_vllms_steps(runner)
        or first_reason(reasons)
        or why_ranks_do_not_replay_together(config)
        or _why_model_inputs_are_not_replayed(runner)
        or why_adapters_need_vllms_steps(config)
        or _why_sampler_is_not_replayed(sampler)
        or _why_attention_is_not_replayed(runner)
        or _why_states_are_not_replayed(runner)
    )


def _why_drafts_need_vllms_steps(runner: Any) -> str | None:
    """Return why steps of an engine with drafts are vLLM's; None if they may be replayed, or there are no drafts."""
    if runner.speculative_config is None:
        return None
    rejection, state, drafter = runner.rejection_sampler, runner.model_state, runner.speculator
    is_head = type(drafter) in HEADS
    reasons = {
        OTHER_DRAFTER: not is_head and type(drafter) is not NgramGPUSpeculator,
        # vLLM's sampler then reads the head's logits, and would read those of rows that replays pad.
        "probabilistic drafts": is_head and drafter.draft_logits is not None,
        # Between two passes the CPU prepares the metadata of the next.
        "a graph for each pass of a head": is_head
        and drafter.num_speculative_steps > 1
        and not drafter.supports_decode_metadata_update,
        # What passes have in common is made ready from Python between them.
        "top-k indices that passes share": is_head and getattr(drafter, "share_mtp_topk_indices", False),
        "more drafts than decode attention takes": runner.decode_query_len > MAX_QUERY_LEN,
        "another rejection sampler": type(rejection) is not RejectionSampler
        or rejection.watermark_key is not None
        or runner.speculative_config.rejection_sample_method not in REJECTION_METHODS,
        "adaptive verification": runner.adaptive_verification is not None,
        "drafts with data parallelism": runner.dp_size > 1,
        "drafts beside LoRA": runner.lora_config is not None,
        "drafts beside states": type(state) is MambaHybridModelState,
        "drafts of a multimodal model": state.supports_mm_inputs or state.rope_state is not None,
    }
    return first_reason(reasons)


def _why_model_inputs_are_not_replayed(runner: Any) -> str | None:
    state = runner.model_state
    is_plain = hasattr(runner.model, "lm_head") and not state.supports_mm_inputs and state.rope_state is None
    unaudited = None if is_plain else find_unaudited(runner.model_config, only_decodes=True)
    reasons = {
        f"{unaudited} is not among the audited models": unaudited is not None,
        "pruning of videos": state.mm_pruner is not None,
    }
    return first_reason(reasons)


def _why_sampler_is_not_replayed(sampler: Any) -> str | None:
    reasons = {
        "custom logits processors": len(sampler.logits_processors) != NUM_LOGITS_PROCESSORS,
        "replayed traces": sampler.trace_replay_state is not None,
        "sampling masks": sampler.return_sampling_mask,
        "VLLM_COMPUTE_NANS_IN_LOGITS": sampler.compute_nans,
    }
    return first_reason(reasons)


def _why_attention_is_not_replayed(runner: Any) -> str | None:
    groups = [group for of_kv_cache_group in runner.attn_groups for group in of_kv_cache_group]
    reasons = {
        # Each KV cache group has block tables, and layers that read them.
        "KV cache groups without attention": not all(runner.attn_groups)
        or not len(runner.attn_groups) == runner.block_tables.num_kv_cache_groups > 0,
        "another attention backend": any(
            type(each) not in (RoseAttentionMetadataBuilder, *STATE_BUILDERS)
            for group in groups
            for each in group.metadata_builders
        ),
        "blocks split for a kernel": any(group.kernel_block_size is not None for group in groups),
        "writes to the null block": runner.block_tables.redirect_writes_to_null_block,
    }
    return first_reason(reasons)


def _why_states_are_not_replayed(runner: Any) -> str | None:
    """Return why steps of layers with a state are vLLM's; None if they may be replayed, or there are none.

    vLLM copies a state to the block of a row's next column. Rose's block manager has one block in all columns, so a
    step that is replayed copies nothing.
    """
    if type(runner.model_state) is not MambaHybridModelState:
        return None
    reasons = {
        "states without Rose's block manager": not uses_rose_manager(runner.vllm_config),
        "--use-replayssm": runner.vllm_config.cache_config.use_replayssm,
    }
    return first_reason(reasons)


def why_step_is_not_replayed(output: SchedulerOutput) -> str | None:
    """Return what keeps a step without drafts from being replayed, whatever its requests are; None if nothing does."""
    for name in FIELDS_OF_OTHER_STEPS:
        if getattr(output, name):
            return name
    if output.scheduled_cached_reqs.resumed_req_ids:
        return "resumed requests"
    return None if output.total_num_scheduled_tokens else "no tokens"


def why_drafts_are_not_replayed(output: SchedulerOutput, num_drafts: int) -> str | None:
    """Return why a step of an engine with drafts is not replayed; None if each request decodes with all its drafts."""
    for name in FIELDS_OF_OTHER_STEPS:
        if name not in _FIELDS_OF_DRAFTS and getattr(output, name):
            return name
    num_requests, drafts = len(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
    reasons = {
        "no tokens": not num_requests,
        "resumed requests": bool(output.scheduled_cached_reqs.resumed_req_ids),
        "structured output beside drafts": output.has_structured_output_requests,
        "prompts beside drafts": any(getattr(output, name) for name in FIELDS_OF_MIXED_STEPS),
        "another number of drafts": output.num_spec_tokens_to_schedule != num_drafts,
    }
    if (reason := first_reason(reasons)) is not None:
        return reason
    # Sums suffice: no row has more than num_drafts drafts, or fewer tokens than its drafts and one.
    is_full = (
        len(drafts) == len(output.scheduled_cached_reqs.req_ids) == num_requests
        and sum(map(len, drafts.values())) == num_requests * num_drafts
        and output.total_num_scheduled_tokens == num_requests * (num_drafts + 1)
    )
    return None if is_full else "rows with fewer drafts, or parts of prompts"


def has_prompts(output: SchedulerOutput) -> bool:
    """Whether a step has new requests or chunks of prompts, and not just one token for each running request.

    False for a prompt of which a single token is left: it looks like a decode.
    """
    num_requests = len(output.num_scheduled_tokens)
    return not (
        num_requests == output.total_num_scheduled_tokens == len(output.scheduled_cached_reqs.req_ids)
        and not any(getattr(output, name) for name in FIELDS_OF_MIXED_STEPS)
    )
