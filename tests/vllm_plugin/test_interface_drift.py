"""What this vLLM calls on the objects that Rose puts in its place, Rose's classes accept, and what batched scheduling
builds, takes apart and counts on is as it was read. Needs no GPU and no engine.

Run it against any installed vLLM: each failure names the member that moved.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import vllm
from vllm.compilation import backends
from vllm.config import (
    CompilationConfig,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector import v1 as kv_connectors
from vllm.lora import model_manager, worker_manager
from vllm.lora.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.ops.triton_ops import lora_kernel_metadata
from vllm.lora.punica_wrapper import PunicaWrapperBase
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import attention as attention_layer
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader import utils as loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import PlatformEnum
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched import async_scheduler, utils
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, core
from vllm.v1.engine.core_client import AsyncMPClient, MPClient
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import attn_utils, block_table, cudagraph_utils, dp_utils, lora_utils, model_runner
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.kv_connector import KVConnector
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata, MambaHybridModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState, apply_bad_words
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState, apply_logit_bias
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState, apply_thinking_budget
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as ar
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from rose_backend.kernels.arguments import LEAST_OF_GROUP
from rose_backend.kernels.linear.int4_formats import AWQ, COMPRESSED_TENSORS, GPTQ_V2
from rose_backend.models.rope import RotaryOptions, rotary_table
from rose_backend.vllm_plugin.attention.backend import (
    _DRAFTER_TAGS,
    RoseAttentionBackend,
    RoseAttentionImpl,
    RoseAttentionMetadataBuilder,
)
from rose_backend.vllm_plugin.captured_processors import SAMPLING_PARAMETERS
from rose_backend.vllm_plugin.kv_cache.groups import RoseBlocks
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.models import decoder, eagle3, float8_weights, int4_method
from rose_backend.vllm_plugin.models.decoder import RoseLinearMethod
from rose_backend.vllm_plugin.models.int4_method import RoseInt4Method
from rose_backend.vllm_plugin.sampler import ReplayedSampling, RoseDraws, RoseTopKTopP
from rose_backend.vllm_plugin.scheduler.decode_batch import DecodeRequestData
from rose_backend.vllm_plugin.scheduler.merged_outputs import has_tokens_only
from rose_backend.vllm_plugin.scheduler.scheduler import BatchedScheduling, observe_drafts
from rose_backend.vllm_plugin.step_graph import addresses as graph_addresses
from rose_backend.vllm_plugin.step_graph.reasons import STATE_BUILDERS
from tests.conftest import ROOT
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import make_simulation

NOT_CALLED_ON_BLOCKS = {
    "get_unhashed_block_ids",  # by KV connectors only, outside of the scheduler
    "get_unhashed_block_ids_all_groups",
}

# All belong to features that are refused at start-up, or that one group of full attention does not need.
IGNORED_ARGUMENTS = """
    skip_zeroing_group_ids dcp_world_size pcp_world_size use_eagle num_hash_lookahead_tokens metrics_collector
    enable_mamba_shared_prefix_checkpoint hash_block_size scheduler_block_size max_in_flight_tokens
"""

EVENT_FIELDS = {
    kv_events.BlockStored: {
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "session_id"),
    },
    kv_events.BlockRemoved: {"block_hashes", "medium", "group_idx"},
    kv_events.AllBlocksCleared: set(),
}
# About other tiers and other kinds of groups than Rose's manager keeps.
# ``lookahead_token_ids``: of hashes that depend on tokens behind a block (0.33), which are refused beside events.
EVENT_FIELDS_LEFT_OUT = {"kv_cache_spec_sliding_window", "locality", "ownership", "lookahead_token_ids"}

# Who serves them: filters, temperature 0 and seeds are Rose's sampler's. vLLM applies the others to the logits before
# the draw, reads logits before it or tokens behind it; watermarks alone take the draw itself.
SAMPLING_FIELDS = """
    n temperature top_p top_k min_p seed watermarking _watermarking_skipped presence_penalty frequency_penalty
    repetition_penalty logit_bias allowed_token_ids bad_words _bad_words_token_ids min_tokens structured_outputs
    thinking_token_budget extra_args trace_decode_token_ids logprobs logprob_token_ids flat_logprobs
    prompt_logprobs prompt_logprob_token_ids prompt_logprob_start stop stop_token_ids ignore_eos max_tokens
    include_stop_str_in_output _eos_token_id _all_stop_token_ids repetition_detection output_text_buffer_length
    detokenize skip_special_tokens spaces_between_special_tokens output_kind stream_interval skip_clone
    skip_reading_prefix_cache routed_experts_prompt_start
"""


def public_functions(owner: type) -> dict[str, Any]:
    return {
        name: getattr(owner, name)
        for name, member in vars(owner).items()
        if not name.startswith("_") and inspect.isfunction(getattr(member, "__func__", member))
    }


def members(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def assert_accepts(ours: Any, theirs: Any, name: str) -> None:
    """Check that a call of ``theirs`` with all arguments works on ``ours``: required ones by place, or all by name."""
    wanted = inspect.signature(theirs).parameters.values()
    accepted = inspect.signature(ours)
    positional = [
        p.name
        for p in wanted
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    by_keyword = {p.name: None for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    try:
        accepted.bind(*positional)
        accepted.bind(**by_keyword)
    except TypeError as error:
        raise AssertionError(
            f"{name}: vLLM has {inspect.signature(theirs)}, Rose {accepted}: {error}"
        ) from error


@pytest.mark.parametrize("name", sorted(public_functions(KVCacheManager)))
def test_block_manager_takes_what_the_scheduler_passes(name: str) -> None:
    assert hasattr(RoseKVCacheManager, name), f"vLLM's KVCacheManager has a new method {name}"
    assert_accepts(getattr(RoseKVCacheManager, name), getattr(KVCacheManager, name), name)


@pytest.mark.parametrize("name", ["allocate_slots", "__init__"])
def test_block_manager_ignores_only_arguments_that_are_known_not_to_matter(name: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(c, name)).parameters for c in (KVCacheManager, RoseKVCacheManager)
    )
    unknown = set(theirs) - set(ours) - set(IGNORED_ARGUMENTS.split())
    assert not unknown, f"{name} has new arguments: {sorted(unknown)}"


def test_block_manager_has_every_public_member() -> None:
    missing = members(KVCacheManager) - members(RoseKVCacheManager)
    assert not missing, f"vLLM's KVCacheManager has members that Rose's lacks: {sorted(missing)}"


def test_the_proposed_interface_is_what_vllm_calls_of_a_manager() -> None:
    page = (ROOT / "docs/proposals/kv_cache_manager.md").read_text()
    defined: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], defined)
    proposed = defined["KVCacheManagerProtocol"]
    listed = {*proposed.__annotations__, *members(proposed)}
    sources = map(inspect.getsource, (scheduler_module, async_scheduler, core))
    assert listed == set(re.findall(r"kv_cache_manager\s*\.\s*([a-z_]+)", "\n".join(sources)))
    for name in listed - {*proposed.__annotations__}:
        assert hasattr(RoseKVCacheManager, name) and hasattr(KVCacheManager, name), name


def test_blocks_have_every_method_that_is_called() -> None:
    missing = set(public_functions(KVCacheBlocks)) - members(RoseBlocks) - NOT_CALLED_ON_BLOCKS
    assert not missing, f"vLLM's KVCacheBlocks has methods that Rose's lacks: {sorted(missing)}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RoseAttentionBackend, AttentionBackend),
        (RoseAttentionImpl, AttentionImpl),
        (RoseAttentionMetadataBuilder, AttentionMetadataBuilder),
    ],
)
def test_attention_classes_are_complete_and_take_the_same_arguments(ours: type, theirs: type) -> None:
    assert not inspect.isabstract(ours), sorted(ours.__abstractmethods__)
    for base in theirs.__mro__:
        for name in [*public_functions(base), "__init__"]:
            if name in vars(ours):
                assert_accepts(getattr(ours, name), getattr(theirs, name), f"{ours.__name__}.{name}")


def test_vllm_asks_for_what_the_attention_classes_override() -> None:
    for owner, name in (
        (AttentionMetadataBuilder, "get_cudagraph_support"),
        (AttentionMetadataBuilder, "build_for_cudagraph_capture"),
        (AttentionMetadataBuilder, "reorder_batch_threshold"),
        (AttentionMetadataBuilder, "supports_draft_decode_metadata_update"),
        (AttentionMetadataBuilder, "update_draft_decode_metadata"),
        (AttentionImpl, "process_weights_after_loading"),
        (AttentionBackend, "supports_sink"),
        (AttentionBackend, "supports_combination"),
        (AttentionBackend, "customize_spec"),
    ):
        assert hasattr(owner, name), f"vLLM's {owner.__name__} has no {name}: ROSE's would never be called"
    layer = inspect.getsource(attention_layer)
    for name in ("_k_scale", "_v_scale", "impl.process_weights_after_loading"):
        assert name in layer, f"vLLM's attention layer has no {name}"


def test_a_graph_of_decodes_is_captured_with_queries_of_one_token_and_a_mixed_one_with_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the longest query at capture, ``RoseAttentionMetadataBuilder`` tells decode graphs from mixed ones."""
    mode = cudagraph_utils.CUDAGraphMode.FULL
    mixed = BatchExecutionDescriptor(cg_mode=mode, num_tokens=8, num_reqs=8)
    longest_queries = []

    class CapturedError(Exception):
        pass

    def make_dummy(*args: Any, max_query_len: int | None = None, **kwargs: Any) -> None:
        longest_queries.append(max_query_len)
        raise CapturedError

    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        for desc in (mixed, replace(mixed, uniform_token_count=1)):
            with pytest.raises(CapturedError):
                create_forward_fn(desc, True)

    monkeypatch.setattr(cudagraph_utils.InputBatch, "make_dummy", make_dummy)
    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)
    manager = object.__new__(cudagraph_utils.ModelCudaGraphManager)
    manager.cudagraph_mode, manager.use_breakable_cg = mode, False
    manager.is_first_pp_rank, manager.max_num_reqs, manager.vllm_config = True, 8, MagicMock()
    model_state = MagicMock()
    model_state.prepare_dummy_inputs.return_value = {}
    manager.vllm_config.parallel_config.data_parallel_size = 1
    manager.capture(MagicMock(), model_state, MagicMock(), None, MagicMock(), [], MagicMock())
    assert longest_queries == [8, 1]


def test_estimating_the_memory_of_graphs_samples_as_many_as_rose_says() -> None:
    source = inspect.getsource(cudagraph_utils.CudaGraphManager)
    for part in (
        "descs = self._capture_descs[mode]",
        "descs[: self._max_full_descs_to_capture]",
        "self._capture_mem_samples.append(",
        # All decode graphs are captured on the stream that Rose gives.
        "graph, pool, stream=self._capture_stream(desc)",
        # Rose's graphs of decodes have as many tokens in a row.
        "self.decode_query_len = decode_query_len",
    ):
        assert part in source, f"CudaGraphManager has no {part}"
    # Set before the capture and read behind it, and not copied in between.
    source = inspect.getsource(cudagraph_utils.profile_cudagraph_memory)
    parts = (
        "manager._max_full_descs_to_capture = _FULL_GRAPH_PROFILING_SAMPLES",
        "manager._capture_mem_samples = mem_samples",
        "runner.capture_model(profile_only=True)",
        "num_full_graphs = len(manager._capture_descs.get(CUDAGraphMode.FULL, []))",
        "_extrapolate_full_graph_memory(mem_samples, num_full_graphs)",
        "measured - sum(mem_samples) + full_estimate",
    )
    places = [source.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places, strict=True))


def test_vllm_says_when_weights_were_replaced_and_captures_again_what_was_released() -> None:
    runner = model_runner.GPUModelRunner
    for owner, name in ((runner, "reload_weights"), (gpu_worker.Worker, "finish_weight_update")):
        assert "reset_lora_state()" in inspect.getsource(getattr(owner, name)), name
    assert list(inspect.signature(runner.reset_lora_state).parameters) == ["self"]
    assert "tags" in inspect.signature(gpu_worker.Worker.wake_up).parameters
    assert "named_buffers()" in inspect.getsource(gpu_worker.Worker.wake_up), "scales of norms are buffers"
    for name in graph_addresses._OWNERS:
        owner = name.partition(".")[0]
        assert f"self.{owner}" in inspect.getsource(runner), f"model runner V2 has no {owner}"
    source = inspect.getsource(cudagraph_utils.CudaGraphManager.release_graphs)
    assert "self.graphs.clear()" in source
    # What is allocated while a model loads is lost in a deep sleep, unlike what is allocated while vLLM profiles.
    source = inspect.getsource(gpu_worker.Worker.load_model)
    assert '_maybe_get_memory_pool_context(tag="weights")' in source
    assert "_get_memory_pool_context" not in inspect.getsource(gpu_worker.Worker.determine_available_memory)
    assert "self.sampler(logits, dummy_input_batch)" in inspect.getsource(runner._dummy_sampler_run)


def test_adapters_are_told_to_kernels_as_replayed_steps_tell_them() -> None:
    source = inspect.getsource(model_runner.GPUModelRunner.execute_model)
    for part in ("self.lora_state.make_lora_inputs(", "self._set_active_loras(*lora_inputs)"):
        assert part in source, f"execute_model has no {part}"
    state = lora_utils.LoraState(2)
    assert list(inspect.signature(state.get_activate_loras).parameters) == ["req_ids"]
    assert list(inspect.signature(state.make_lora_inputs).parameters) == [
        *("req_ids", "idx_mapping", "num_scheduled_tokens"),
    ]
    inspect.signature(model_runner.GPUModelRunner.maybe_dummy_run_with_lora).bind(
        "self", "lora_config", "num_scheduled_tokens", None, num_active_loras=1
    )
    # What an adapter is loaded by, and what else changes the adapter of a place.
    source = inspect.getsource(worker_manager.LRUCacheWorkerLoRAManager.add_adapter)
    assert "not in self.list_adapters()" in source and "or lora_request.load_inplace" in source
    source = inspect.getsource(model_manager.LoRAModelManager)
    for part in (
        "self.lora_index_to_id",
        "self.model.lora_manager = self",
        "self._last_slot_layout != slot_layout",
    ):
        assert part in source, f"LoRAModelManager has no {part}"
    # Kernels read tensors that are made once and filled in place; for rows after these there is nothing to do.
    source = inspect.getsource(lora_kernel_metadata.LoRAKernelMeta)
    assert source.count("torch.empty(") + source.count("torch.zeros(") == 5
    assert "self.active_lora_ids.fill_(-1)" in source and "[:num_tokens].copy_(" in source
    # What Rose's layers read: the adapter of each token, whether there is one at all, and where adapters are.
    source = inspect.getsource(model_manager.LoRAModelManager._init_punica_wrapper)
    assert "self.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY]" in source
    source = inspect.getsource(PunicaWrapperBase._update_base_metadata)
    assert "self._token_lora_indices[: base_indices.shape[0]].copy_(base_indices)" in source
    source = inspect.getsource(lora_kernel_metadata.LoRAKernelMeta.prepare_tensors)
    assert "self.no_lora_flag_cpu[0] = no_lora" in source
    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        source = inspect.getsource(layer.create_lora_weights)
        assert "self.lora_a_stacked = tuple(" in source and "self.lora_b_stacked = tuple(" in source
    for layer in (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA):
        source = inspect.getsource(layer.set_lora)
        assert ".copy_(" in source and "_stacked =" not in source, layer.__name__


def test_blocks_are_copied_in_steps_without_tokens() -> None:
    # A checkpoint may be due while all requests wait for their tokens, as with pipeline stages.
    v1, v2 = gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner
    for runner, update, has_no_tokens in (
        (v1, "_update_states", "if not num_scheduled_tokens:"),
        (v2, "update_requests", "if scheduler_output.total_num_scheduled_tokens == 0:"),
    ):
        assert "copy_kv_cache_blocks_inplace(" in inspect.getsource(getattr(runner, update))
        source = inspect.getsource(runner.execute_model)
        places = [source.find(part) for part in (f"self.{update}(scheduler_output)", has_no_tokens)]
        assert -1 not in places and places == sorted(places), (runner.__module__, places)


def test_block_tables_hold_what_steady_steps_write() -> None:
    # Steady steps write new blocks and vLLM's count of them; vLLM's next step brings the count to the device.
    source = inspect.getsource(BlockTables.append_block_ids)
    assert "self.num_blocks.np[i, req_index] = end" in source and "stage_write(req_index, start, " in source
    assert "self.num_blocks.copy_to_uva()" in inspect.getsource(BlockTables.apply_staged_writes)
    assert "for i in range(self.num_kv_cache_groups):" in source and "block_ids = new_block_ids[i]" in source
    assert "self.block_tables.apply_staged_writes()" in inspect.getsource(
        model_runner.GPUModelRunner.execute_model
    )


def test_layers_read_the_embeddings_and_positions_that_steady_steps_write() -> None:
    """See ``ModelInputs``, and the order in ``StepGraphs._update_requests``."""
    for owner, names in (
        (ModelState, ("supports_mm_inputs", "encoder_runner")),
        (DefaultModelState, ("rope_state", "mm_pruner", "prompt_embeds_state")),
        (EncoderRunner, ("inputs_embeds",)),
        (RopeState, ("num_dims", "positions", "prefill_delta")),
    ):
        source = inspect.getsource(owner)
        assert all(re.search(rf"self\.{name}(: .*)? = ", source) for name in names), owner.__name__
    source = inspect.getsource(DefaultModelState)
    for part in (
        "self.encoder_runner.inputs_embeds[:num_tokens]",
        "self.rope_state.get_positions(num_tokens)",
    ):
        assert part in source, f"graphs do not hold {part}"
    assert "self.prefill_delta = UvaBackedTensor(" in inspect.getsource(RopeState)
    assert "self.positions[:, :num_tokens]" in inspect.getsource(RopeState.get_positions)
    # Media are within prompts, so that a decode embeds its id and nothing else.
    source = inspect.getsource(EncoderRunner.gather_mm_embeddings)
    assert "if is_decode.all():" in source and "return [], is_mm_embed" in source
    source = inspect.getsource(model_runner.GPUModelRunner.execute_model)
    calls = ("finish_requests(", "free_states(", "add_requests(", "update_requests(", "apply_staged_writes()")
    places = [source.find(call) for call in calls]
    assert -1 not in places and places == sorted(places), places
    assert "encoder_input_updates" not in source or (
        places[3] < source.find("self.encoder_cache.update_encoder_inputs(req_id, updates)") < places[4]
    )


def test_steady_steps_find_the_tables_and_builders_of_each_kv_cache_group() -> None:
    source = inspect.getsource(BlockTables.__init__)
    for name in ("block_sizes", "num_kv_cache_groups", "block_tables", "input_block_tables", "slot_mappings"):
        assert f"self.{name}" in source, f"BlockTables has no {name}"
    assert BlockTables.redirect_writes_to_null_block is False
    # One after the other in all of them.
    source = inspect.getsource(attn_utils.build_attn_metadata)
    for part in ("block_tables[i]", "slot_mappings[i]", "for attn_group in attn_groups[i]:"):
        assert part in source, f"build_attn_metadata has no {part}"
    group = AttentionGroup(object, [], MagicMock(), 0, metadata_builders=["first", "of another microbatch"])
    assert group.get_metadata_builder() == "first"


_OF_MAMBA = """
    num_prefills num_prefill_tokens num_decodes num_decode_tokens num_reqs has_initial_states_p query_start_loc_p
    state_indices_tensor_p state_indices_tensor_d query_start_loc_d num_accepted_tokens seq_lens cu_chunk_seqlen_p
    last_chunk_indices_p nums_dict batch_ptr token_chunk_offset_ptr write_pos_d is_flush_d bc_pre_scratch
    replayssm_scratch replayssm_state_indices_d
"""
STATE_METADATA: dict[Any, str] = {
    GDNAttentionMetadata: """
        num_prefills num_prefill_tokens num_decodes num_decode_tokens num_spec_decodes num_spec_decode_tokens
        num_actual_tokens checkpoint has_initial_state spec_query_start_loc non_spec_query_start_loc
        spec_state_indices_tensor non_spec_state_indices_tensor spec_sequence_masks spec_sequence_masks_cpu
        spec_token_indx non_spec_token_indx num_accepted_tokens uniform_spec_sequence_length chunk_indices
        chunk_offsets prefill_query_start_loc prefill_state_indices prefill_has_initial_state aiter_prefill_metadata
        nums_dict batch_ptr token_chunk_offset_ptr
    """,
    ShortConvAttentionMetadata: _OF_MAMBA,
    Mamba2AttentionMetadata: _OF_MAMBA
    + "prep_initial_states chunk_size seq_idx_p checkpoint_chunk_idx checkpoint_meta",
    MambaHybridAttnMetadata: "is_prefilling num_accepted_tokens num_decode_draft_tokens_cpu",
}
"""Of what layers with a state are told in a step, every field that was looked at."""
STATE_MEMBERS = """
    _align_mode _get_mamba_group_info _mamba_ctx _mamba_group_ids _mamba_spec _mamba_src_col_gpu _mamba_src_off_gpu
    _mamba_state_copy_funcs _mamba_state_idx_gpu cache_config device max_model_len max_num_reqs model
    num_accepted_tokens_gpu recoverssm vllm_config
"""
"""Of the model state. From step to step it keeps columns, which prologues write, and counts of drafts."""


@pytest.mark.parametrize("owner", STATE_METADATA, ids=lambda owner: owner.__name__)
def test_layers_with_a_state_are_told_what_is_known(owner: Any) -> None:
    assert set(owner.__dataclass_fields__) == set(STATE_METADATA[owner].split())


def test_states_are_kept_as_replayed_steps_keep_them() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(MambaHybridModelState)))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert not used - set(STATE_MEMBERS.split()), f"MambaHybridModelState uses {used}"
    assert "_mamba_state_idx_gpu" in used
    hooks = {name for name in vars(MambaHybridModelState) if not name.startswith("_")}
    known = {"add_request", "initialize_kv_cache", "preprocess_state", "prepare_attn", "postprocess_state"}
    assert hooks == known, "a step does more with states"
    # ``StepGraphs._prepare`` zeroes blocks; ``update_requests`` does all of what a step without prompts may have.
    source = inspect.getsource(model_runner.GPUModelRunner.update_requests)
    assert "self.kv_block_zeroer.zero_block_ids(scheduler_output.new_block_ids_to_zero)" in source
    for builder, (blocks, starts) in STATE_BUILDERS.items():
        source = "".join(inspect.getsource(each) for each in builder.__mro__[:2])
        assert all(f"self.{name}" in source for name in (blocks, starts) if name), builder.__name__


def test_samplers_call_what_rose_puts_in_its_place_with_the_same_arguments() -> None:
    for name in ("add_request", "apply_staged_writes", "get_logprobs_dims"):
        assert hasattr(Sampler, name), f"model runner V2's Sampler has no {name}"
    runner = inspect.getsource(model_runner.GPUModelRunner)
    for call in ("self.sampler.add_request(", "self.sampler.apply_staged_writes("):
        assert call in runner, f"model runner V2 does not call {call})"
    # What vLLM passes besides goes on to its own draw.
    ours = [name for name in inspect.signature(RoseDraws.__call__).parameters if name != "args"]
    for owner in (Sampler, GPUWatermarkSampler):
        theirs = list(inspect.signature(owner._sample_random).parameters)
        assert theirs[: len(ours)] == ours, f"{owner.__name__}._sample_random takes {theirs}"
    assert hasattr(SamplingStates, "any_explicit_seed"), "SamplingStates has no any_explicit_seed"
    assert "self.watermarking = " in inspect.getsource(GPUWatermarkSampler.__init__)
    # Only a check of drafts wants top-k and top-p applied before.
    assert "skip_top_k_top_p=True" in inspect.getsource(Sampler.sample)
    assert "self.sampler.apply_sampling_params(" in inspect.getsource(RejectionSampler)
    first = list(inspect.signature(Sampler.apply_sampling_params).parameters)[1:5]
    assert first == ["logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np"]
    assert_accepts(ReplayedSampling.__call__, Sampler.sample, "Sampler.sample")
    assert "self.sample(" in inspect.getsource(Sampler.__call__)
    assert "self.needs_logits_processing = " in inspect.getsource(Sampler.__init__)
    source = inspect.getsource(Sampler)
    for name in ("self.logits_processors", "self.thinking_budget_state"):
        # Whoever changes logits says so when a request comes.
        assert name in source and "needs_processing |= processor.add_request(" in source
    assert "needs_processing |= self.thinking_budget_state.add_request(" in source
    for function in (apply_temperature, apply_min_p):
        assert len(inspect.signature(function).parameters) == 3, function.__name__
    for name in SAMPLING_PARAMETERS:
        makes = "np.empty(" if name == "num_logprobs" else "UvaBackedTensor("
        assert f"self.{name} = {makes}" in inspect.getsource(SamplingStates), name
    assert_accepts(RoseTopKTopP.__call__, TopKTopPSampler.forward_native, "TopKTopPSampler.forward")
    inspect.signature(apply_top_k_top_p).bind("logits", "k", "p")


def test_processors_that_graphs_hold_take_the_same_arguments_and_keep_the_same_state() -> None:
    rows, drafts = ["logits", "expanded_idx_mapping"], ["expanded_local_pos"]
    committed = ["all_token_ids", "total_len"]
    expected = {
        apply_logit_bias: [
            *(*rows, "pos", "num_allowed_token_ids", "allowed_token_ids", "num_logit_bias"),
            *("logit_bias_token_ids", "logit_bias", "min_lens", "num_stop_token_ids"),
            *("restore_when_all_masked", "stop_token_ids", "check_all_masked_rows"),
        ],
        apply_penalties: [
            *(*rows, "token_ids", *drafts, "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("prompt_bin_mask", "output_bin_counts"),
        ],
        apply_bad_words: [
            *(*rows, "bad_word_token_ids", "bad_word_offsets", "num_bad_words", "all_token_ids"),
            *("prompt_len", "total_len", "input_ids", *drafts, "max_num_bad_words"),
        ],
        apply_thinking_budget: [
            *("logits", "req_ids", "expanded_idx_mapping", "thinking_token_budget", *committed, "input_ids"),
            *(*drafts, "cached_last_start", "cached_last_end", "cached_scan_pos"),
            *(f"{each}_token_ids" for each in ("reasoning_start", "natural_reasoning_end", "reasoning_end")),
        ],
        compute_topk_scores: [
            *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state"),
            *("expanded_idx_mapping", "max_per_req_token_ids", "logits_mode"),
        ],
    }
    for function, parameters in expected.items():
        assert list(inspect.signature(function).parameters) == parameters, function.__name__
    # In this order, and nothing else; each tells for every request whether it changes its logits.
    source = inspect.getsource(Sampler.apply_sampling_params)
    steps = ("processor.apply(", "thinking_budget_state.apply(", "apply_temperature(", "apply_min_p(")
    places = [source.index(step) for step in steps]
    assert places == sorted(places) and source.count(".apply") == len(steps) + source.count(
        "apply_top_k_top_p("
    )
    order = [
        inspect.getsource(Sampler.__init__).index(f"{name}_state,\n")
        for name in ("bias", "penalties", "words")
    ]
    assert order == sorted(order)
    moving = {
        LogitBiasState: ("num_allowed_token_ids", "num_logit_bias", "min_lens", "num_stop_token_ids"),
        PenaltiesState: ("repetition_penalty", "frequency_penalty", "presence_penalty"),
        BadWordsState: ("num_bad_words",),
        ThinkingBudgetState: ("thinking_token_budget",),
    }
    for owner, names in moving.items():
        source = inspect.getsource(owner)
        assert source.count("UvaBackedTensor(") == len(names) + (owner is LogitBiasState), owner.__name__
        assert all(f"self.{name} = UvaBackedTensor(" in source for name in names), owner.__name__
    source = inspect.getsource(RequestState.__init__)
    assert source.count("= UvaBackedTensor(") == 2
    assert all(f"self.{name} = UvaBackedTensor(" in source for name in ("prompt_len", "prefill_len"))
    # What a replayed step's record has in place of the tensors.
    assert LogprobsLists._fields == (
        *("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"),
    )
    assert {"structured_output_request_ids", "grammar_bitmask"} <= set(GrammarOutput.__dataclass_fields__)


def test_steps_with_prompts_are_described_as_vllm_describes_them() -> None:
    """See ``StepGraphs._describe``: the order of rows, and which rows with part of a prompt are decodes."""
    counts = {"chunk": 5, "decode": 1, "tail": 3, "another": 1}
    assert model_runner.sort_batch_req_ids(counts, {}, 1) == ["decode", "another", "tail", "chunk"]
    source = inspect.getsource(model_runner.GPUModelRunner.gather_batch_req_state)
    assert "one_token_ext = (num_new_tokens == 1) & (num_computed_prefill_tokens_np > 0)" in source
    assert "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np" in source
    source = inspect.getsource(PromptLogprobsWorker.__init__)
    assert all(f"self.{name}" in source for name in ("uses_prompt_logprobs = ", "token_id_scores: dict"))


def test_data_parallel_ranks_vote_as_replayed_steps_do() -> None:
    """See ``StepVotes``: one collective in each step with tokens, and in each dummy step, by one call."""
    runner = model_runner.GPUModelRunner
    source = textwrap.dedent(inspect.getsource(runner.execute_model))
    (call,) = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "dispatch_cg_and_sync_dp"
    ]
    assert [ast.unparse(each) for each in call.args] == [
        *(
            "self.cudagraph_manager",
            "num_reqs",
            "num_toks",
            "uniform_tok_count",
            "self.dp_size",
            "self.dp_rank",
        ),
    ]
    named = {str(each.arg): ast.unparse(each.value) for each in call.keywords}
    # From 0.33 on; replayed steps have it false.
    assert named.pop("allow_skip_drafts", "scheduler_output.skip_drafts") == "scheduler_output.skip_drafts"
    assert named == {
        "max_query_len": "max_query_len",
        # Of encoder-decoder models alone, which are not replayed.
        "need_eager": "is_profile or skip_compiled",
        "num_active_loras": "num_active_loras",
        "parallel_config": "self.parallel_config",
        "allow_ubatching": "self.ubatch_runner is not None and (not skip_attn_for_dummy_run)",
        "uniform_decode": "uniform_tok_count == self.decode_query_len",
    }
    places = [source.find(part) for part in ("total_num_scheduled_tokens == 0:", "dispatch_cg_and_sync_dp(")]
    assert -1 not in places and places == sorted(places), places
    assert "dummy_run=True" in inspect.getsource(runner._dummy_run)
    assert inspect.getsource(dp_utils.sync_cudagraph_and_dp_padding).count("all_reduce") == 1
    sources = Path(dp_utils.__file__).parent.rglob("*.py")
    assert [each.name for each in sources if "get_dp_group()" in each.read_text()] == ["dp_utils.py"]
    assert "uniform_token_count" in dp_utils.DPSyncState.__dataclass_fields__
    assert "dp_sync_state" in model_runner.ExecuteModelState._fields
    # Where a graph is replayed, nothing is told how many tokens other ranks have.
    for manager in (cudagraph_utils.CudaGraphManager, cudagraph_utils.ModelCudaGraphManager):
        assert "dp" not in inspect.getsource(manager.run_fullgraph), manager.__name__


def test_connectors_are_called_in_the_order_of_replayed_steps() -> None:
    """See ``StepGraphs._run_graph_of_layers`` and ``take_output``; vLLM finalizes later only beside a drafter."""
    hooks = {name for name in vars(KVConnector) if not name.startswith("_")}
    assert hooks - {"finalize_step"} == {
        *(
            "pre_forward",
            "finish_forward",
            "post_forward",
            "no_forward",
            "set_disabled",
            "reset_capture_state",
        ),
    }
    runner = model_runner.GPUModelRunner
    for method, calls in (
        (runner.execute_model, ("prepare_inputs(", "pre_forward(", "run_fullgraph(", "finish_forward(")),
        # The first is of pipeline stages before the last one.
        (runner.sample_tokens, ("post_forward(", "self.sample(", "AsyncOutput(", "post_forward(")),
    ):
        source, end = inspect.getsource(method), 0
        for call in calls:
            end = source.index(call, end) + len(call)
    assert source[end:].split()[0].startswith("finished_req_ids")
    assert "finalize_step" not in hooks or "defer_kv_finalize = self.speculator is not None" in source


@pytest.mark.parametrize("name", ["offloading_connector", "nixl/connector", "lmcache_mp_connector"])
def test_connectors_outside_of_layers_do_nothing_in_them(name: str) -> None:
    """Not imported: LMCache's package may be missing."""
    source = (Path(kv_connectors.__file__).parent / f"{name}.py").read_text()
    methods = {each.name: each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)}
    assert not {"requires_piecewise_for_cudagraph", "finish_forward", "reset_capture_state"} & set(methods)
    for method in ("wait_for_layer_load", "save_kv_layer"):
        # But for a docstring.
        assert all(isinstance(each, ast.Pass | ast.Return | ast.Expr) for each in methods[method].body)
        assert not any(isinstance(each, ast.Call) for part in methods[method].body for each in ast.walk(part))
    loads = [each for each in ast.walk(ast.parse(source)) if getattr(each, "name", "") == "start_load_kv"]
    names = {each.id for load in loads for each in ast.walk(load) if isinstance(each, ast.Name)}
    assert loads and not {"kwargs", "forward_context"} & names


def test_every_kind_of_request_is_known() -> None:
    """A new field may ask for something that Rose's draw would leave out; see ``why_vllm_draws``."""
    new = set(SamplingParams.__struct_fields__) - set(SAMPLING_FIELDS.split())
    assert not new, f"SamplingParams has new fields: {sorted(new)}"


def test_outputs_of_the_engine_have_the_fields_that_are_merged() -> None:
    assert {"outputs", "weight_version"} <= set(EngineCoreOutputs.__struct_fields__)
    # As it comes out of the socket; a field that is never its default would keep everything apart.
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])])
    (output,) = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message)).outputs
    assert has_tokens_only(output)
    assert "self.outputs_queue = asyncio.Queue" in inspect.getsource(AsyncMPClient.__init__)
    assert "self.vllm_config = " in inspect.getsource(MPClient.__init__)


@pytest.mark.parametrize("event", EVENT_FIELDS, ids=lambda event: event.__name__)
def test_events_have_the_fields_that_are_filled_and_no_new_ones(event: Any) -> None:
    fields = set(event.__struct_fields__)
    assert EVENT_FIELDS[event] <= fields, f"gone: {sorted(EVENT_FIELDS[event] - fields)}"
    unknown = fields - EVENT_FIELDS[event] - EVENT_FIELDS_LEFT_OUT
    assert not unknown, f"new fields of {event.__name__}: {sorted(unknown)}"


def test_requests_carry_what_keys_and_events_are_made_of() -> None:
    request = Request(
        "a",
        [1, 2, 3],
        SamplingParams(max_tokens=1),
        None,
        cache_salt="s",
        lora_request=LoRARequest("n", 1, "/p"),
    )
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 1, 0)
    assert keys == (("lora", "n", "/p"), ("cache_salt", "s"))
    assert kv_cache_utils.to_event_extra_keys([keys]) == [("n", "s")]
    assert kv_cache_utils.maybe_convert_block_hash(bytes(32)) in (0, bytes(32))
    for name in ("block_hashes", "session_id", "resumable", "kv_cache_report_mode", "num_computed_tokens"):
        assert hasattr(request, name), f"Request has no {name}"
    assert (request.lora_request.adapter_id, request.lora_request.name) == (1, "n")


FIELDS = {
    BatchExecutionDescriptor: "num_tokens num_reqs uniform_token_count",
    CompilationConfig: "cudagraph_mode cudagraph_capture_sizes max_cudagraph_capture_size",
    SpeculativeConfig: "method model",
    ModelConfig: "use_fp64_gumbel return_sampling_mask logprobs_mode",
    # These decide whether Rose serves a group.
    FullAttentionSpec: "sliding_window attention_chunk_size non_causal",
    AttentionGroup: "kv_cache_spec kernel_block_size metadata_builders",
}


@pytest.mark.parametrize("owner", FIELDS, ids=lambda owner: owner.__name__)
def test_vllms_classes_have_the_fields_that_rose_reads(owner: Any) -> None:
    assert set(FIELDS[owner].split()) <= owner.__dataclass_fields__.keys()


def test_both_names_of_n_grams_have_one_lookup_in_model_runner_v2() -> None:
    """See ``config_hook``."""
    assert 'return self.method in ("ngram", "ngram_gpu")' in inspect.getsource(SpeculativeConfig.use_ngram)
    source = inspect.getsource(init_speculator)
    assert "speculative_config.use_ngram()" in source and "ngram_gpu" not in source
    assert "method" not in inspect.getsource(NgramGPUSpeculator)


@pytest.mark.parametrize("runner", ["v1/spec_decode", "v1/worker/gpu/spec_decode"])
def test_drafters_are_built_under_a_name_of_their_own(runner: str) -> None:
    """See ``RoseAttentionImpl.is_drafter``."""
    assert backends.model_tag not in _DRAFTER_TAGS
    files = sorted((Path(vllm.__file__).parent / runner).rglob("*.py"))
    sources = [source for file in files if " get_model(" in (source := file.read_text())]
    tags = [set(re.findall(r'with set_model_tag\("(\w+)"', source)) for source in sources]
    assert len(tags) > 3 and all(each and each <= _DRAFTER_TAGS for each in tags)


def test_drafts_are_verified_and_proposed_as_replayed_steps_do_it() -> None:
    """See ``step_graph/draft_steps.py``."""
    assert list(inspect.signature(rejection_sample).parameters)[:12] == [
        *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping"),
        *("expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps"),
        "synthetic_conditional_rates",
    ]
    inspect.signature(rejection_sample).bind(*range(12), use_fp64=False, use_block_verification=False)
    verify = inspect.getsource(RejectionSampler._verify)
    for name in ("sampling_states.temperature.gpu", "sampling_states.seeds.gpu", "num_speculative_steps"):
        assert f"self.{'' if name.startswith('num') else 'sampler.'}{name}," in verify
    for name in ("synthetic_conditional_rates", "use_block_verification"):
        assert f"self.{name}" in verify
    propose = list(inspect.signature(NgramGPUSpeculator.propose).parameters)
    assert propose[1:12] == [
        *("input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
        *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
    ]
    # All that the lookup reads of a batch.
    source = inspect.getsource(NgramGPUSpeculator)
    assert {*re.findall(r"input_batch\.(\w+)", source)} == {"num_reqs", "idx_mapping"}
    for owner, name in (
        (LogitBiasState, "use_logit_bias"),
        (PenaltiesState, "use_penalty"),
        (BadWordsState, "num_bad_words"),
        (ThinkingBudgetState, "use_thinking_budget"),
    ):
        assert f"self.{name} = " in inspect.getsource(owner.__init__)
    told = inspect.getsource(DraftTokensHandler.set_draft_tokens)
    assert {*re.findall(r"input_batch\.(\w+)", told)} == {"req_ids", "has_structured_output_reqs"}


def test_heads_propose_as_replayed_steps_do_it() -> None:
    """See ``step_graph/head_steps.py``."""
    # Nothing is done before and after passes, as other heads do.
    assert {name for name in vars(EagleSpeculator) if not name.startswith("_")} == {"load_draft_model"}
    # An MTP module does, where what it calls "top-k indices" is shared.
    hooks = {name for name in vars(MTPSpeculator) if not name.startswith("_")} - {
        *("load_draft_model", "share_mtp_topk_indices")
    }
    for name in hooks:
        body = ast.parse(textwrap.dedent(inspect.getsource(getattr(MTPSpeculator, name)))).body[0].body
        assert [type(each) for each in body] == [ast.If]
        assert "self.share_mtp_topk_indices" in ast.unparse(body[0].test)
    propose = inspect.getsource(ar.TargetDependentARSpeculator.propose)
    order = (
        *(
            "self.model.combine_hidden_states(",
            "torch.cat(aux_hidden_states, dim=-1)",
            "hidden_states = last",
        ),
        *("self._copy_request_inputs(", "prepare_prefill_inputs(", "].copy_(hidden_states)"),
        *("self.prefill_cudagraph_manager,", "run_fullgraph(prefill_batch_desc)"),
        # Without drafts that was all.
        "if num_speculative_tokens == 0:",
        *("prepare_decode_inputs(", "self.draft_tokens[:num_reqs, 0],"),
        *("self.decode_cudagraph_manager,", "specialize_spec_tokens(", "self._fused_multi_step_decode"),
    )
    places = [propose.index(part) for part in order]
    assert places == sorted(places)
    inspect.signature(ar.prepare_prefill_inputs).bind(*range(9))
    inspect.signature(ar.prepare_decode_inputs).bind(*range(7), advance_draft_positions=True)
    read = inspect.getsource(ar.prepare_prefill_inputs)
    assert {*re.findall(r"input_batch\.(\w+)", read)} == {
        *("num_reqs", "input_ids", "positions", "idx_mapping", "query_start_loc", "seq_lens")
    }
    # All that a head without draft logits reads of requests.
    sample = inspect.getsource(DraftModelSpeculator.sample_draft)
    assert sample.index("if draft_logits is not None") < sample.index("temperature,\n                seeds")
    # Rows that are no request's are none of the head's.
    assert "is_real_req = req_state_idx >= 0" in inspect.getsource(block_table)
    assert "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens" in inspect.getsource(
        model_runner.GPUModelRunner.sample_tokens
    )


def test_configuration_names_what_speculation_needs() -> None:
    for name in ("num_lookahead_tokens", "num_prefill_lookahead_tokens", "use_v2_model_runner"):
        assert isinstance(getattr(VllmConfig, name), property), f"VllmConfig has no {name}"
    assert "attention_chunk_size" in inspect.getsource(ModelConfig), (
        "chunked local attention would go unnoticed"
    )
    for name in ("use_multi_module_mtp", "use_gemma4_mtp"):
        assert callable(getattr(SpeculativeConfig, name)), f"SpeculativeConfig has no {name}"


def test_a_draft_model_takes_inputs_of_a_step_beside_its_tokens() -> None:
    """See ``BatchedScheduling._num_inputs``."""
    assert isinstance(SpeculativeConfig.max_num_new_slots_for_drafting, property)
    schedule = inspect.getsource(Scheduler.schedule)
    for line in (
        "draft_slots = spec.max_num_new_slots_for_drafting if spec is not None else 0",
        "input_budget = self.scheduler_config.max_num_batched_tokens",
        "input_budget -= num_new_tokens + draft_slots",
    ):
        assert line in schedule
    # What it makes is not asked how many are wanted (``why_drafts_are_fixed``).
    propose = inspect.getsource(StandaloneARSpeculator.propose)
    assert "range(" not in propose and propose.count("num_speculative_tokens") == 1


@pytest.mark.parametrize("family", ["Llama", "MiMo", "Mistral", "Qwen2", "Qwen3"])
def test_models_with_roses_layers_take_what_runners_pass_and_load_as_vllms(family: str) -> None:
    ours = getattr(decoder, f"Rose{family}ForCausalLM")
    theirs = ours.__mro__[2]
    assert theirs.__name__ == f"{family}ForCausalLM" and theirs.__module__.startswith("vllm.")
    assert_accepts(ours.forward, theirs.forward, "forward")
    # All else is vLLM's: weights, head, logits.
    assert {name for name in vars(decoder.RoseDecoder) if not name.startswith("__")} == {
        "forward",
        "_update_layer",
        "_choose_packed_rows",
        "take_moved_weights",
        "_adapter_rows",
        "lora_manager",
    }
    assert ours.load_weights is theirs.load_weights and ours.compute_logits is theirs.compute_logits


def test_heads_with_roses_layer_take_what_drafters_pass_and_load_as_vllms() -> None:
    ours = eagle3.RoseEagle3LlamaForCausalLM
    theirs = ours.__mro__[1]
    assert theirs.__name__ == "Eagle3LlamaForCausalLM" and theirs.__module__.startswith("vllm.")
    assert_accepts(ours.forward, theirs.forward, "forward")
    # All else is vLLM's: weights, auxiliary hidden states, logits.
    overridden = {name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("_")}
    assert overridden == {"forward", "get_top_tokens"}
    assert_accepts(ours.get_top_tokens, theirs.get_top_tokens, "get_top_tokens")


@pytest.mark.parametrize(
    ("module", "family"),
    [("qwen2_5_vl", "Qwen2_5_VL"), ("qwen3_vl", "Qwen3VL")],
)
def test_models_with_images_call_their_language_model_as_rose_does(module: str, family: str) -> None:
    """Without torchvision, which vLLM's modules import: by their sources."""
    path = Path(inspect.getfile(decoder.LlamaForCausalLM)).with_name(f"{module}.py")
    outer = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == f"{family}ForConditionalGeneration"
    )
    methods = {node.name: ast.unparse(node) for node in outer.body if isinstance(node, ast.FunctionDef)}
    forward = methods["forward"]
    assert "input_ids: torch.Tensor | None, positions: torch.Tensor" in forward
    assert forward.count("self.language_model.model(") == 1 and "return hidden_states" in forward
    # What else it does around that.
    assert set(re.findall(r"self\.(\w+)", forward)) - {"language_model"} == (
        {"_get_deepstack_input_embeds", "_clear_deepstack_input_embeds"} if family == "Qwen3VL" else set()
    )
    if family == "Qwen3VL":
        counter = "self.deepstack_input_embeds_num_tokens"
        assert f"{counter} = num_tokens" in methods["_set_deepstack_input_embeds"]
        assert f"{counter} = 0" in methods["_clear_deepstack_input_embeds"]


def test_linear_modules_call_what_rose_puts_in_the_place_of_their_method() -> None:
    for name in ("process_weights_after_loading", "apply"):
        assert_accepts(getattr(RoseLinearMethod, name), getattr(UnquantizedLinearMethod, name), name)


def test_float8_weights_are_kept_by_the_kernels_and_methods_that_are_known() -> None:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.quantization import fp8, modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.online import fp8 as online

    owners = (fp8, modelopt, compressed_tensors, online)
    for name in float8_weights.METHODS:
        assert any(hasattr(owner, name) for owner in owners), name
    by_blocks = {each.__name__ for each in kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    by_rows = {each.__name__ for each in kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]}
    # These rearrange weights, or have not been read.
    others = {"B12xFp8BlockScaledMMKernel", "MarlinFP8ScaledMMLinearKernel", "HummingFP8ScaledMMLinearKernel"}
    assert by_blocks == others | set(float8_weights.BLOCK_KERNELS)
    # Those before Marlin's need compute capability 9.0: on 8.9 it is taken, which is why vLLM's layers stay there.
    names = [each.__name__ for each in kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]]
    assert names.index("MarlinFP8ScaledMMLinearKernel") < names.index("TritonFp8BlockScaledMMKernel")
    assert kernels.MarlinFP8ScaledMMLinearKernel.can_implement(None) == (True, None)
    others = others - {"B12xFp8BlockScaledMMKernel"} | {"B12xTensorFP8ScaledMMLinearKernel"}
    assert by_rows == others | set(float8_weights.ROW_KERNELS)


def test_int4_weights_are_made_by_the_methods_that_are_known() -> None:
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes

    owners = (auto_awq, auto_gptq, compressed_tensors)
    for name in int4_method.METHODS:
        assert any(hasattr(owner, name) for owner in owners), name
    for name in ("create_weights", "process_weights_after_loading", "apply"):
        assert_accepts(getattr(RoseInt4Method, name), getattr(LinearMethodBase, name), name)
    # In which order a checkpoint's codes are, and by which names.
    makers = {
        auto_awq.AutoAWQMarlinLinearMethod: AWQ,
        auto_awq.AutoAWQLinearMethod: AWQ,
        auto_gptq.AutoGPTQLinearMethod: GPTQ_V2,
        getattr(schemes, int4_method.SCHEME): COMPRESSED_TENSORS,
    }
    for maker, form in makers.items():
        source = inspect.getsource(maker.create_weights)
        for name in (form.codes.name, form.zeros.name, form.scales_name):
            assert f'register_parameter("{name}"' in source, maker
    assert tuple(auto_awq._REVERSE_AWQ_PACK_ORDER) == AWQ.codes.order == AWQ.zeros.order
    # GPTQ's zeros are not looked at.
    assert "zero_points=False" in inspect.getsource(auto_gptq.AutoGPTQLinearMethod.create_weights)
    # A method for activations in 8 bits is another one.
    scheme = inspect.getsource(compressed_tensors.CompressedTensorsConfig._get_scheme_from_parts)
    assert scheme.count(f"return {int4_method.SCHEME}(") == 1


def test_vllms_kernels_multiply_what_they_have_quantized(make_config: MakeConfig) -> None:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    classes = {name: getattr(kernels, name) for name in float8_weights.QUANTIZED_KERNELS}
    assert set(classes) <= {*float8_weights.BLOCK_KERNELS, *float8_weights.ROW_KERNELS}
    bases = (kernels.FP8ScaledMMLinearKernel, kernels.Fp8BlockScaledMMLinearKernel)
    for name, kind in classes.items():
        rows, blocks = bases
        base = blocks if name in float8_weights.BLOCK_KERNELS else rows
        assert kind.apply_weights is base.apply_weights and kind.get_output_padding is base.get_output_padding
        multiply = kind.apply_block_scaled_mm if base is blocks else kind.apply_scaled_mm
        of_rows = set() if base is blocks else {"out_dtype", "bias", "output_shape"}
        assert set(inspect.signature(multiply).parameters) == {"self", "A", "B", "As", "Bs"} | of_rows
        # Their scales are laid out so.
        assert base is rows or "column_major_scales=True" in inspect.getsource(kind.__init__)
        assert base is rows or kind.apply_input_quant
    for base in bases:
        source = inspect.getsource(base.apply_weights)
        assert "self.quant_fp8(" in source and "self.config.out_dtype" in source
    parameters = inspect.signature(fp8_utils.per_token_group_quant_fp8).parameters
    assert parameters["eps"].default == LEAST_OF_GROUP and not parameters["tma_aligned_scales"].default
    source = inspect.getsource(QuantFP8.forward_cuda)
    assert "fp8_utils.per_token_group_quant_fp8(" in source and "ops.scaled_fp8_quant(" in source
    with set_current_vllm_config(make_config()):
        quantize = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN, num_token_padding=None)
        groups = QuantFP8(
            static=False, group_shape=GroupShape(1, 128), column_major_scales=True, use_ue8m0=True
        )
    assert tuple(quantize.group_shape) == (1, -1) and not quantize.static
    assert quantize.num_token_padding is None and groups.use_ue8m0 and not groups.tma_aligned_scales
    # On a CPU vLLM's kernel is not what it calls.
    assert quantize._forward_method != quantize.forward_cuda


def test_weights_are_loaded_as_roses_loaders_take_them() -> None:
    # vLLM's reloads put another tensor in the place of an argument of this name.
    assert next(iter(inspect.signature(partial(decoder._load_gate_up, None)).parameters)) == "param"
    assert list(inspect.signature(partial(decoder._load_norm, None)).parameters) == list(
        inspect.signature(default_weight_loader).parameters
    )
    module = MergedColumnParallelLinear
    for theirs in (module.weight_loader, module.weight_loader_v2):
        assert_accepts(partial(decoder._load_gate_up, None), partial(theirs, None), "weight_loader")
    assert set(inspect.signature(module.validate_shard_id).parameters) == {"self", "shard_id"}
    # Looked up where the weight is loaded, not kept from the start.
    assert "param.weight_loader(param, loaded_weight, shard_id)" in inspect.getsource(module.load_weights)


def test_attention_modules_tell_a_step_and_the_end_of_loading_as_roses_layers_read_them() -> None:
    returned = inspect.signature(attention_layer.get_attention_context, eval_str=True).return_annotation
    assert len(get_args(returned)) == 4
    called: list[Any] = []
    impl = SimpleNamespace(process_weights_after_loading=called.append)
    module = SimpleNamespace(impl=impl, quant_config=None, layer_name="a layer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_layer, "set_default_quant_scales", lambda *args, **kwargs: None)
        attention_layer.Attention.process_weights_after_loading(module, torch.float16)
    assert called == [torch.float16]
    # Called behind all other modules, whose norms are there then.
    source = inspect.getsource(loading.process_weights_after_loading)
    assert source.index("quant_method.process_weights") < source.index(
        "module.process_weights_after_loading("
    )


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_the_rotary_table_that_rose_takes_is_vllms_before_it_is_rounded(rope_type: str) -> None:
    parameters = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
    }[rope_type]
    if rope_type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = 64
    options = RotaryOptions(rope_theta=10_000.0, rope_type=rope_type, **parameters)
    with set_current_vllm_config(VllmConfig()):
        fields = {"rope_theta": 10_000.0, "rope_type": rope_type, **parameters}
        rotary = get_rope(32, 256, rope_parameters=fields, dtype=torch.float16)
        table = decoder.RoseConstants(rotary, torch.device("cpu")).rotary_table
    assert table.dtype == torch.float32 and rotary.cos_sin_cache.dtype == torch.float16
    assert torch.equal(table.half(), rotary.cos_sin_cache)
    # And so what the standalone engine computes.
    torch.testing.assert_close(table, rotary_table(options, 32, len(table), torch.device("cpu")))


# Of the objects that a batched step builds or takes apart, or a replayed one leaves to a graph: every field that was
# looked at. A new one may ask for something that they have to do, too.
STEP_FIELDS: dict[Any, str] = {
    SchedulerOutput: """
        scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens
        scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids preempted_req_ids
        free_encoder_mm_hashes scheduled_encoder_input_stats has_structured_output_requests
        pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata has_sync_kv_loads
        aux_output_connector_metadata ec_connector_metadata ec_manager_metadata new_block_ids_to_zero
        kv_cache_block_copies kv_connector_block_state num_spec_tokens_to_schedule num_common_prefix_blocks
    """,
    NewRequestData: """
        req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens lora_request
        prompt_embeds prompt_is_token_ids prefill_token_ids replay_start
    """,
    CachedRequestData: """
        req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens
    """,
    EngineCoreOutput: """
        request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason stop_reason
        events kv_transfer_params ec_transfer_params trace_headers prefill_stats routed_experts num_nans_in_logits
        mm_cache_miss_hashes new_sampling_mask spec_decode_metrics prompt_token_id_logprobs
    """,
    EngineCoreOutputs: """
        engine_index outputs scheduler_stats timestamp utility_output finished_requests wave_complete start_wave
        weight_version
    """,
    ModelRunnerOutput: """
        req_ids req_id_to_index sampled_token_ids logprobs prompt_logprobs_dict prompt_token_id_logprobs_dict
        pooler_output kv_connector_output ec_connector_output num_nans_in_logits cudagraph_stats
        aux_output_connector_output sampling_masks
    """,
    SpecDecodingStats: """
        num_spec_tokens num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos
        num_draft_tokens_per_pos
    """,
}
FROM_0_33 = {"skip_drafts", "encoder_input_updates", "error"}

# What the batched path reads or sets on vLLM's own objects.
SCHEDULER_MEMBERS = """
    running waiting kv_holding_waiting deferred_waiting requests finished_req_ids reset_preempted_req_ids
    prev_step_scheduled_req_ids num_waiting_for_streaming_input max_num_active_reqs max_num_scheduled_tokens
    max_model_len current_step _pause_state prefill_capacity_bound use_v2_model_runner encoder_cache_manager
    sched_step_seq enable_kv_cache_events get_request_counts _free_cow_retained_blocks
    _handle_blocked_waiting_request _preempt_request finish_requests make_stats finished_req_ids_dict
    grammar_compile_error_reqs encoder_cache_mismatch_reqs num_spec_tokens scheduler_config log_stats
"""
REQUEST_MEMBERS = """
    num_computed_tokens num_output_placeholders num_in_flight_tokens num_stale_output_tokens num_prompt_tokens
    num_tokens_with_spec max_tokens is_prefill_chunk prefill_stats events status structured_output_request
    resumable trace_headers client_index _block_hasher _all_token_ids _output_token_ids update_block_hashes
    sampling_params mm_features has_encoder_inputs num_tokens spec_decode_metrics
"""
SAMPLING_MEMBERS = "eos_token_id stop_token_ids num_logprobs repetition_detection"
# Outside its loop over requests, ``update_from_output`` reads these of the scheduler: what a steady step reports itself
# is what is left of it without connectors, errors and stopped requests.
END_OF_STEP_MEMBERS = """
    make_stats kv_cache_manager kv_event_publisher finished_req_ids_dict perf_metrics grammar_compile_error_reqs
    encoder_cache_mismatch_reqs finish_requests connector ec_connector recompute_kv_load_failures
    _handle_failed_recving _handle_invalid_blocks _update_from_kv_xfer_finished defer_block_free
    processed_step_seq _drain_deferred_frees _drain_deferred_loads running waiting kv_holding_waiting
    deferred_waiting _enqueue_waiting_request
"""
# What may end the usual course of a running request, and the functions that change it.
COURSE_OF_A_REQUEST = {"status", "events", "prefill_stats", "num_stale_output_tokens"}
CHANGES_OF_COURSE = {
    *("finish_requests", "_preempt_request"),  # They count as interventions.
    *("update_from_output", "check_stop", "_handle_stopped_request"),  # Of requests that are left to vLLM.
    *("schedule", "_handle_blocked_waiting_request", "add_request"),  # Of requests that are not running.
    "_update_request_as_session",  # Sessions are always left to vLLM.
}


@pytest.mark.parametrize("owner", STEP_FIELDS, ids=lambda owner: owner.__name__)
def test_steps_and_outputs_have_the_fields_that_are_known(owner: Any) -> None:
    fields = getattr(owner, "__struct_fields__", None) or tuple(owner.__dataclass_fields__)
    assert set(fields) - FROM_0_33 == set(STEP_FIELDS[owner].split()), owner.__name__
    if owner is EngineCoreOutput:
        # Built by position, thousands of times a second.
        assert fields[:2] == ("request_id", "new_token_ids")


@pytest.mark.parametrize("name", ["schedule", "update_from_output", "add_request"])
def test_the_scheduler_is_called_as_the_batched_one_takes_it(name: str) -> None:
    for theirs in (Scheduler, AsyncScheduler):
        ours, wanted = (
            inspect.signature(getattr(owner, name)).parameters for owner in (BatchedScheduling, theirs)
        )
        assert list(ours) == list(wanted)
        assert [p.default for p in ours.values()] == [p.default for p in wanted.values()]


def test_scheduler_and_requests_have_what_the_batched_path_uses(make_config: MakeConfig) -> None:
    scheduler = make_simulation(make_config, num_blocks=20, block_size=16, max_num_seqs=2).scheduler
    missing = set(SCHEDULER_MEMBERS.split()) - set(dir(scheduler))
    assert not missing, f"vLLM's Scheduler has lost {sorted(missing)}"
    for name in ("get_freed_mm_hashes", "get_manager_metadata", "get_cached_input_ids"):
        assert callable(getattr(scheduler.encoder_cache_manager, name))
    params = SamplingParams(max_tokens=1)
    request = Request("a", [1, 2, 3], params, None)
    missing = set(REQUEST_MEMBERS.split()) - set(dir(request))
    missing |= set(SAMPLING_MEMBERS.split()) - set(dir(params))
    assert not missing, f"vLLM's Request and SamplingParams have lost {sorted(missing)}"
    # The facts of a request hold these two lists: they must stay the same objects.
    lists = request._all_token_ids, request._output_token_ids
    request.append_output_token_ids(4)
    assert (request._all_token_ids, request._output_token_ids) == ([1, 2, 3, 4], [4])
    assert lists[0] is request._all_token_ids and lists[1] is request._output_token_ids
    assert RequestStatus.is_finished(RequestStatus.FINISHED_ABORTED)
    assert not RequestStatus.is_finished(RequestStatus.RUNNING)


def test_the_end_of_a_step_uses_nothing_new() -> None:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(Scheduler.update_from_output))).body
    assert isinstance(function, ast.FunctionDef)
    statements = [each for each in function.body if not _is_loop_over_requests(each)]
    assert len(statements) == len(function.body) - 1, "the loop over requests is written otherwise"
    used = {
        node.attr
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    new = used - set(END_OF_STEP_MEMBERS.split())
    assert not new, f"Scheduler.update_from_output uses {new}"


def _is_loop_over_requests(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.For) and ast.unparse(statement.iter) == "num_scheduled_tokens.items()"


@pytest.mark.parametrize("module", [scheduler_module, async_scheduler, utils])
def test_nothing_new_changes_the_course_of_a_request(module: Any) -> None:
    functions = [
        node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)
    ]
    changing = {function.name for function in functions if any(_changes_of_course(function))}
    assert not changing - CHANGES_OF_COURSE, f"{module.__name__} changes requests in {changing}"
    assert module is not scheduler_module or changing >= {"finish_requests", "_preempt_request"}


def _changes_of_course(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for node in ast.walk(function):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and node.attr in COURSE_OF_A_REQUEST:
            yield node
        if isinstance(node, ast.Attribute) and node.attr == "record_event":
            yield node


def test_drafts_of_many_requests_are_counted_as_vllm_counts_each() -> None:
    counts = [4, 1, 1, 3, 2, 4]
    at_once, one_by_one = SpecDecodingStats.new(3), SpecDecodingStats.new(3)
    for stats in (at_once, one_by_one):
        stats.observe_draft(2, 1)
    observe_drafts(at_once, counts, 3)
    for count in counts:
        one_by_one.observe_draft(3, count - 1)
    assert at_once == one_by_one
    assert {type(number) for number in at_once.num_accepted_tokens_per_pos} == {int}


def test_model_runner_v2_leaves_the_drafts_of_a_step_as_they_are() -> None:
    v1, v2 = (inspect.getsource(module) for module in (gpu_model_runner, model_runner))
    assert "update_scheduler_for_invalid_drafts" in v1 and "update_scheduler_for_invalid_drafts" not in v2
    reads = re.findall(r"^.*scheduled_spec_decode_tokens.*$", v2, re.MULTILINE)
    assert reads and {each.strip() for each in reads} == {
        "draft_tokens = scheduler_output.scheduled_spec_decode_tokens"
    }
    assert not re.search(r"\bdraft_tokens\.(pop|clear|update)\(", v2)


def test_data_of_decodes_is_vllms_own() -> None:
    numbers = np.array([[0, 1], [32, 32], [20, 9], [17, 4], [99, 99]])
    lazy = DecodeRequestData.of(["a", "b"], [None, ([3],)], numbers, 2)
    other = pickle.loads(pickle.dumps(lazy))
    wanted = CachedRequestData(["a", "b"], set(), [], {}, [None, ([3],)], [22, 11], [6, 8])
    assert type(other) is CachedRequestData
    assert other == wanted
    assert repr(lazy).replace("DecodeRequestData", "CachedRequestData") == repr(wanted)
    assert lazy.num_reqs == 2 and not lazy.is_context_phase("a")
    assert lazy.num_computed_tokens is lazy.num_computed_tokens
