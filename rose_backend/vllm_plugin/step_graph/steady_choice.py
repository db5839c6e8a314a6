"""Which engines, steps and batches are replayed whole; everything else is vLLM's, with the reason.

Nothing here changes anything, and all of it is equal on all ranks of a tensor parallel group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rose_backend.vllm_plugin.options import first_reason
from rose_backend.vllm_plugin.sampler.sampler_v2 import ReplayedSampling

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput

NUM_LOGITS_PROCESSORS = 3
"""vLLM's own: bias, penalties, bad words."""

FIELDS_OF_PROMPTS = (
    "scheduled_new_reqs",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "free_encoder_mm_hashes",
    "num_invalid_spec_tokens",
    "has_structured_output_requests",
    "pending_structured_output_tokens",
    "kv_connector_metadata",
    "has_sync_kv_loads",
    "aux_output_connector_metadata",
    "ec_connector_metadata",
    "ec_manager_metadata",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
    "num_spec_tokens_to_schedule",
    # Of vLLM 0.33.
    "encoder_input_updates",
    "skip_drafts",
)
"""Fields of a scheduler output that are empty, None or false in a steady step."""

_REASONS = {
    "scheduled_new_reqs": "prompts",
    "has_structured_output_requests": "structured output",
    "pending_structured_output_tokens": "structured output",
    "kv_cache_block_copies": "prompts",
}


def why_engine_is_not_steady(runner: Any) -> str | None:
    """Return what in this engine a steady step leaves out; None if nothing.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its attention initialized.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.gpu.ec_connector import NO_OP_EC_CONNECTOR
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    state, sampler, manager = runner.model_state, runner.sampler, runner.cudagraph_manager
    config = runner.vllm_config
    reasons = {
        "drafts": runner.speculative_config is not None or runner.use_aux_hidden_state_outputs,
        "LoRA": runner.lora_config is not None,
        "pipeline parallelism": runner.use_pp,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "engines in step with others": runner.dp_size > 1,
        "microbatches": runner.ubatch_runner is not None,
        "pooling": runner.is_pooling_model,
        "multimodal inputs": runner.uses_inputs_embeds or runner.encoder_cache is not None,
        "a KV connector": runner.kv_connector is not NO_OP_KV_CONNECTOR,
        "an encoder cache connector": runner.ec_connector is not NO_OP_EC_CONNECTOR,
        "outputs for a connector": runner.aux_output_connector is not None,
        "expert load balancing": config.parallel_config.enable_eplb or runner.check_ep_fault,
        "KV sharing in prefill": runner.fast_prefill is not None,
        "sharded sampling": runner.batch_sharder is not None,
        "graph metrics": config.observability_config.cudagraph_metrics,
        "layers with a state": any(
            isinstance(group.kv_cache_spec, MambaSpec) for groups in runner.attn_groups for group in groups
        ),
        "a model with its own state": type(state) is not DefaultModelState
        or state.rope_state is not None
        or state.prompt_embeds_state is not None
        or state.num_new_sampled_tokens_per_step != 1,
        "a model without lm_head": not hasattr(runner.model, "lm_head"),
        "another sampler": type(sampler) is not Sampler,
        "no full graphs of decodes": manager is None or not manager._capture_descs.get(CUDAGraphMode.FULL),
    }
    return (
        first_reason(reasons) or _why_sampler_is_not_steady(sampler) or _why_attention_is_not_steady(runner)
    )


def _why_sampler_is_not_steady(sampler: Any) -> str | None:
    reasons = {
        "custom logits processors": len(sampler.logits_processors) != NUM_LOGITS_PROCESSORS,
        "replayed traces": sampler.trace_replay_state is not None,
        "sampling masks": sampler.return_sampling_mask,
        "VLLM_COMPUTE_NANS_IN_LOGITS": sampler.compute_nans,
    }
    return first_reason(reasons)


def _why_attention_is_not_steady(runner: Any) -> str | None:
    from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder

    groups = [group for of_kv_cache_group in runner.attn_groups for group in of_kv_cache_group]
    reasons = {
        # Each KV cache group has block tables, and layers that read them.
        "KV cache groups without attention": not all(runner.attn_groups)
        or not len(runner.attn_groups) == runner.block_tables.num_kv_cache_groups > 0,
        "another attention backend": any(
            type(each) is not RoseAttentionMetadataBuilder
            for group in groups
            for each in group.metadata_builders
        ),
        "blocks split for a kernel": any(group.kernel_block_size is not None for group in groups),
        "writes to the null block": runner.block_tables.redirect_writes_to_null_block,
    }
    return first_reason(reasons)


def why_step_is_not_steady(output: SchedulerOutput) -> str | None:
    """Return what a step has besides one token for each of some running requests; None if nothing."""
    for name in FIELDS_OF_PROMPTS:
        if getattr(output, name, None):
            return _REASONS.get(name, name)
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        return "prompts"
    if not output.total_num_scheduled_tokens:
        return "no tokens"
    num_requests = len(output.num_scheduled_tokens)
    if not num_requests == output.total_num_scheduled_tokens == len(cached.req_ids):
        return "prompts"
    return None


class SteadyBatches:
    """Says of a batch whose requests get one token each whether, and how, its step is replayed.

    Args:
        runner: of an engine without ``why_engine_is_not_steady``.
    """

    def __init__(self, runner: Any) -> None:
        self._sampler = runner.sampler
        self._prefill_lens = runner.req_states.prefill_len.np
        self._temperatures = runner.sampler.sampling_states.temperature.np
        sample = runner.sampler.sample
        self.replayed = sample if isinstance(sample, ReplayedSampling) else None
        """Rose's sampler, where draws are replayed."""

    def kind_of(
        self, slots: NDArray[np.int64], num_computed_tokens: list[int], num_rows: int
    ) -> tuple[str | None, str | None]:
        """Return ``("greedy", None)``, ``("drawn", None)``, or None and why the step is vLLM's.

        Args:
            slots: of the requests.
            num_computed_tokens: of each.
            num_rows: of the graph.
        """
        if (np.asarray(num_computed_tokens) < self._prefill_lens[slots]).any():
            return None, "prompts"
        if self._sampler.get_logprobs_dims(slots) is not None:
            return None, "log-probabilities"
        if not self._temperatures[slots].any():
            if self._sampler.needs_logits_processing[slots].any():
                return None, "penalties and other logits processors"
            return "greedy", None
        if self.replayed is None:
            return None, "random draws by vLLM's sampler"
        if self.replayed.is_changed[slots].any():
            return None, "penalties and other logits processors"
        if num_rows > max(self.replayed.graphs.sizes, default=0):
            return None, "more random draws than graphs take"
        return "drawn", None
