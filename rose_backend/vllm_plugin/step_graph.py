"""Steps of one model runner as a few replays: Rose's prologue, vLLM's own graph of the layers, Rose's ends.

The prologue makes the inputs from the requests' state. An end computes logits, samples and moves that state on: there
is one for greedy requests, one for random draws, and one for any mix of requests whose logits are processed first.
Behind it, log-probabilities are reported if a request asks for them. So the CPU only hands over what changed and
replays. All state is vLLM's, and complete after every step: steps of both kinds may alternate.

Steady steps only decode, and nothing changes from one to the next. Mixed steps compute parts of prompts, too: their
prologue is launched, as it depends on the chunks, and they have one end, for any mix of requests.

First comes which engines, steps and batches are replayed whole (equal on all ranks of a tensor parallel group), then
the steps, then where they enter model runner V2: capture, execution and sampling of a step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.compilation import cudagraph_pool
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import graph_capture
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.cudagraph_utils import _extrapolate_full_graph_memory
from vllm.v1.worker.gpu.ec_connector import NO_OP_EC_CONNECTOR
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rose_backend.errors import IntegrityError
from rose_backend.kernels.arguments import (
    MixedRows,
    StateGroup,
    StepGroup,
    StepGroups,
    StepInputs,
    StepState,
)
from rose_backend.kernels.captured_graphs import CapturedGraphs, FixedInputs, size_for
from rose_backend.kernels.decode_step.ops import (
    NO_SLOT,
    begin_decode_step,
    begin_mixed_step,
    end_step,
    write_block_ids,
)
from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.captured_processors import (
    GrammarMasks,
    ReportRecord,
    why_graphs_do_not_report,
)
from rose_backend.vllm_plugin.graph_addresses import (
    GraphAddresses,
    StaleGraphs,
    largest_of_ranks,
    which_graphs_hold,
)
from rose_backend.vllm_plugin.options import (
    first_reason,
    has_connector_in_layers,
    rose_options,
    uses_rose_manager,
    why_adapters_need_vllms_steps,
)
from rose_backend.vllm_plugin.plugin_logger import SAMPLES, STEPS, logger
from rose_backend.vllm_plugin.sampler import ReplayedSampling

NUM_LOGITS_PROCESSORS = 3
"""vLLM's own: bias, penalties, bad words."""

_FIELDS_OF_ENCODER_CACHE = ("free_encoder_mm_hashes", "encoder_input_updates")
"""Of items whose encoder outputs are needed no more; the second is there from vLLM 0.33 on."""
_FIELDS_OF_CHANGED_BATCHES = (
    *("finished_req_ids", "preempted_req_ids", "kv_cache_block_copies"),
    *_FIELDS_OF_ENCODER_CACHE,
)
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
"""Fields of a scheduler output that are empty, None or false in a replayed step: all others that this vLLM has."""

STATE_BUILDERS: dict[type, tuple[str, str | None]] = {
    GDNAttentionMetadataBuilder: ("non_spec_state_indices_tensor", "non_spec_query_start_loc"),
    Mamba2AttentionMetadataBuilder: ("state_indices_tensor_d", None),
    ShortConvAttentionMetadataBuilder: ("state_indices_tensor_d", None),
}
"""vLLM's metadata builders of layers with a state, by exact type, with their tensors that graphs of decodes read: the
block of each row's state, the null block in rows of padding, and a copy of the step's ``query_start_loc``."""


def why_engine_is_not_replayed(runner: Any) -> str | None:
    """Return what in this engine a replayed step leaves out; None if nothing.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its attention initialized.
    """
    state, sampler, manager = runner.model_state, runner.sampler, runner.cudagraph_manager
    config = runner.vllm_config
    reasons = {
        "drafts": runner.speculative_config is not None or runner.use_aux_hidden_state_outputs,
        "pipeline parallelism": runner.use_pp,
        "context parallelism": runner.use_dcp or runner.pcp_manager is not None,
        "engines in step with others": runner.dp_size > 1,
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
        first_reason(reasons)
        or _why_model_inputs_are_not_replayed(runner)
        or why_adapters_need_vllms_steps(config)
        or _why_sampler_is_not_replayed(sampler)
        or _why_attention_is_not_replayed(runner)
        or _why_states_are_not_replayed(runner)
    )


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
    """Return what a step has besides tokens of running and of new requests; None if nothing."""
    for name in FIELDS_OF_OTHER_STEPS:
        if getattr(output, name):
            return name
    if output.scheduled_cached_reqs.resumed_req_ids:
        return "resumed requests"
    return None if output.total_num_scheduled_tokens else "no tokens"


def has_prompts(output: SchedulerOutput) -> bool:
    """Whether a step has anything besides one token for each running request: new requests, chunks.

    A prompt of which one token is left looks like a decode.
    """
    num_requests = len(output.num_scheduled_tokens)
    return not (
        num_requests == output.total_num_scheduled_tokens == len(output.scheduled_cached_reqs.req_ids)
        and not any(getattr(output, name) for name in FIELDS_OF_MIXED_STEPS)
    )


NUM_BUFFERS = 8
"""Steps whose tokens are kept at once. vLLM reads a step's tokens before it schedules the second step after it, with
pipeline stages (which have no step graph) somewhat later. Workers that nobody asks for tokens never read them."""


class OutputBuffers:
    """CPU memory for the tokens of the last steps, in turn, and for what they report.

    Args:
        max_num_rows: of a step.
        num_words: of a row's ``ReportRecord``; 0 without reports.
        device: where the tokens are.
    """

    def __init__(self, max_num_rows: int, num_words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = [
            (
                torch.empty(max_num_rows, 1, dtype=torch.int64, pin_memory=is_cuda),
                torch.empty(max_num_rows, num_words, dtype=torch.int64, pin_memory=is_cuda),
                # As vLLM's: a thread that waits sleeps, rather than holding a lock of the driver.
                torch.cuda.Event(blocking=True) if is_cuda else None,
            )
            for _ in range(NUM_BUFFERS)
        ]
        self._num_steps = 0

    def copy(self, batch: ReplayedBatch, tokens: torch.Tensor, record: torch.Tensor | None) -> ReplayedOutput:
        """Start to copy the tokens of one step, [R] int64, after what has been launched so far, and its record.

        The copies are on the stream of the steps: the next one overwrites ``tokens`` only after them.
        """
        step, num_rows = self._num_steps, len(batch.request_ids)
        self._num_steps += 1
        on_cpu, record_on_cpu, event = self._buffers[step % NUM_BUFFERS]
        on_cpu[:num_rows].copy_(tokens[:num_rows].view(-1, 1), non_blocking=True)
        if record is not None:
            record_on_cpu[:num_rows].copy_(record[:num_rows], non_blocking=True)
        if event is not None:
            event.record()
        return ReplayedOutput(self, step, batch)

    def read(self, step: int, batch: ReplayedBatch) -> tuple[list[list[int]], NDArray[np.int64] | None]:
        """Wait for a step, counted from 0; return each row's list, of a token or none, and a copy of what it reports.

        Raises:
            IntegrityError: the tokens were overwritten by those of a later step.
        """
        on_cpu, record_on_cpu, event = self._buffers[step % NUM_BUFFERS]
        num_rows = len(batch.request_ids)
        if event is not None:
            event.synchronize()
        tokens: list[list[int]] = on_cpu[:num_rows].tolist()
        for row in batch.rows_without_token:
            tokens[row] = []
        # A later step writes to this memory, perhaps before the front end has been told.
        record = None if batch.num_logprobs is None else record_on_cpu[:num_rows].numpy().copy()
        if self._num_steps > step + NUM_BUFFERS:
            raise IntegrityError(
                f"step graph: tokens of step {step} were asked for after {self._num_steps} steps, and "
                f"{NUM_BUFFERS} are kept"
            )
        return tokens, record


class ReplayedOutput(AsyncModelRunnerOutput):
    """What a replayed step returns to vLLM: a token of each request whose prompt is complete, and log-probabilities.

    Args:
        buffers: that hold the tokens.
        step: as ``OutputBuffers`` counts.
        batch: of the step; its lists are shared between steps.
    """

    def __init__(self, buffers: OutputBuffers, step: int, batch: ReplayedBatch) -> None:
        self._buffers, self._step, self._batch = buffers, step, batch
        self.kv_connector_output: KVConnectorOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and return its tokens."""
        batch = self._batch
        tokens, record = self._buffers.read(self._step, batch)
        output = ModelRunnerOutput(
            req_ids=batch.request_ids,
            req_id_to_index=batch.index_of,
            sampled_token_ids=tokens,
            kv_connector_output=self.kv_connector_output,
        )
        if record is not None and batch.num_logprobs is not None:
            output.logprobs = ReportRecord.read(record, batch.num_logprobs)
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what the KV connector has reported; vLLM asks from 0.33 on, if ``get_output`` has failed."""
        return self.kv_connector_output


class ModelInputs:
    """What layers read beside vLLM's input buffers: embeddings, in multimodal models, and M-RoPE positions.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2).
        max_num_rows: of a step that only decodes.
    """

    def __init__(self, runner: Any, max_num_rows: int) -> None:
        self._runner = runner
        self._has_embeds = runner.model_state.supports_mm_inputs
        self._has_rope = runner.model_state.rope_state is not None
        has_any = self._has_embeds or self._has_rope
        self.is_prepared_by_vllm = has_any and find_unaudited(runner.model_config) is not None
        """In steps with prompts, as their layers need Python."""
        # vLLM's own take turns, from one step with new requests to the next.
        self._deltas = torch.zeros(max_num_rows, dtype=torch.int32, device=runner.device)

    def take_over(self, slots: NDArray[np.int64], num_rows: int) -> None:
        """Bring what belongs to the requests of the next steps that only decode to where their graphs read it."""
        if not self._has_rope:
            return
        deltas = torch.zeros(num_rows, dtype=torch.int32, pin_memory=self._deltas.is_cuda)
        deltas.numpy()[: len(slots)] = self._runner.model_state.rope_state.prefill_delta.np[slots]
        # torch keeps pinned memory until the copy has run.
        self._deltas[:num_rows].copy_(deltas, non_blocking=True)

    def prepare(self, inputs: StepInputs, step: MixedStep, num_tokens: int, output: SchedulerOutput) -> None:
        """Let vLLM write them for a step with prompts, and encode its images.

        Args:
            num_tokens: of the step, padding included.
        """
        if not self._has_embeds and not self._has_rope:
            return
        state, states, num_requests = self._runner.model_state, self._runner.req_states, len(step.request_ids)
        starts = np.cumsum([0, *step.counts])
        # Of vLLM's ``InputBatch``, what is read of it here.
        batch: Any = SimpleNamespace(
            req_ids=step.request_ids,
            idx_mapping=inputs.request_slots[:num_requests],
            num_scheduled_tokens=np.array(step.counts),
            num_tokens=int(starts[-1]),
            num_tokens_after_padding=num_tokens,
            query_start_loc=inputs.query_start_loc[: num_requests + 1],
            query_start_loc_np=starts,
            num_computed_tokens_np=np.array(step.num_computed_tokens),
            prefill_len_np=np.array(step.prefill_lens),
            input_ids=inputs.input_ids,
        )
        if self._has_embeds:
            state.prepare_inputs_embeds(output.scheduled_encoder_inputs, batch, states)
        state.prepare_inputs(batch, states)

    def write(self, inputs: StepInputs, num_rows: int) -> None:
        """Write them for a step that only decodes, from its ids and positions: a text's, in all dimensions alike."""
        state = self._runner.model_state
        if self._has_rope:
            rope = state.rope_state
            positions = inputs.positions[:num_rows].expand(rope.num_dims, num_rows)
            torch.add(positions, self._deltas[:num_rows], out=rope.positions[:, :num_rows])
        if self._has_embeds:
            embeds = self._runner.model.embed_input_ids(inputs.input_ids[:num_rows])
            state.encoder_runner.inputs_embeds[:num_rows].copy_(embeds)


End = tuple[str, int]
"""``greedy``, ``drawn``, ``processed`` or ``mixed``; and the number of rows."""


@dataclass(frozen=True)
class ReplayedBatch:
    """The requests that the graphs' rows belong to now."""

    request_ids: list[str]
    end: str
    """The kind that samples it; a batch of decodes with grammars takes ``processed`` instead."""
    draws: bool
    """Whether some request is not greedy."""
    num_logprobs: int | None
    """Most likely tokens that a request wants at most; None if no request wants log-probabilities."""
    desc: Any
    """vLLM's ``BatchExecutionDescriptor``."""
    slots: dict[str, int]
    index_of: dict[str, int]
    num_rows_of_end: int
    rows_without_token: tuple[int, ...] = ()
    """Rows whose prompt is not complete after this step."""


@dataclass(frozen=True)
class MixedStep:
    """What a step with prompts computes, of each request, in the order of rows: those with fewest tokens first."""

    request_ids: list[str]
    counts: list[int]
    num_computed_tokens: list[int]
    prefill_lens: list[int]
    """Tokens that are known from the start."""
    is_prompt: list[bool]
    """Its tokens are known from the start."""
    is_due: list[bool]
    """Nothing known remains to be computed, so it gets a token."""
    has_single_tokens: bool
    """vLLM takes it for a step of decodes: no request has more tokens, and none begins."""


_ENDS_WITH_MASKS = ("processed", "mixed")
_MIXED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
"""Numbers of rows that a mixed step's end is captured for, up to the largest decode graph. Fewer than decode graphs:
they only save rows of the head's product, in steps that take longer anyway."""


class StepGraphs:
    """Captures and replays the steps of one model runner.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs captured, without ``why_engine_is_not_replayed``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager = runner.cudagraph_manager
        sampler = runner.sampler
        self._sampler = sampler
        self._prefill_lens = runner.req_states.prefill_len.np
        self._temperatures = sampler.sampling_states.temperature.np
        # Rose's, where draws are replayed.
        self._replayed = sampler.sample if isinstance(sampler.sample, ReplayedSampling) else None
        self._desc_of = _decode_graphs(self._manager, runner.max_num_reqs, num_adapters=0)
        has_lora = runner.lora_config is not None
        # Of vLLM's graphs with products of adapters; it has others without.
        self._adapted_desc_of = (
            _decode_graphs(self._manager, runner.max_num_reqs, num_adapters=1) if has_lora else {}
        )
        # The adapter in each LoRA slot when kernels were last told those of the rows.
        self._lora_slots: list[int | None] | None = None
        self._sizes = sorted({desc.num_tokens for desc in self._desc_of.values()}, reverse=True)
        most = max(self._sizes, default=0)
        device = runner.device
        self._slots = torch.full((most,), NO_SLOT, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._state = _state_of(runner)
        self._inputs = _inputs_of(runner, max(most, runner.max_num_reqs))
        self._model_inputs = ModelInputs(runner, most)
        self._groups = _groups_of(runner)
        self._copies = _copies_of(runner)
        self._mixed_sizes: list[int] = []
        self._begins = CapturedGraphs[int](self._begin, capture_error_mode="thread_local")
        parts: tuple[Callable[[End, Any], Any], ...] = (self._end,)
        num_words = 0
        if self._replayed is not None:
            self._processors = self._replayed.whole_steps(most)
            self._masks = GrammarMasks(most, runner.vocab_size, device)
            self._record = ReportRecord(most, runner.vocab_size, device)
            parts, num_words = (self._end, self._report), ReportRecord.NUM_WORDS
        if self._replayed is not None and not self._groups.has_states:
            self._mixed_sizes = [*(size for size in _MIXED_SIZES if size < most), *[most] * (most > 0)]
            self._row_inputs = _row_inputs(max(most, runner.max_num_reqs), device)
            self._rows = MixedRows(**self._row_inputs.tensors)
            # Hidden states of the rows' last tokens.
            self._last_hidden = torch.zeros_like(self._manager.hidden_states[:most])
        self._ends = CapturedGraphs[End](*parts, capture_error_mode="thread_local")
        self._buffers = OutputBuffers(most, num_words, device)
        self._armed: ReplayedBatch | None = None
        # Of the step whose tokens nobody has asked for yet: its batch while it waits for masks, or its output.
        self._waiting: ReplayedBatch | None = None
        self._pending: ReplayedOutput | None = None
        self._finished_req_ids: set[str] = set()
        self._padded_rows = 0
        self._padded_last_rows = 0
        self._compute_logits = runner.model.compute_logits
        # Products of other sizes round otherwise; so both kinds of steps multiply the same rows.
        runner.model.compute_logits = self._compute_padded_logits

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture prologue and ends of vLLM's decode graphs, captured on ``stream``, and the ends of mixed steps."""
        self.stream = stream
        start = time.perf_counter()
        free_before = torch.cuda.mem_get_info()[0]
        runner, manager = self._runner, self._manager
        # Tensors were just filled on another stream: a kernel that reads indices must not find what was there before.
        stream.wait_stream(torch.cuda.current_stream())
        with (
            graph_capture(device=runner.device),
            # Products have a workspace on each stream.
            torch.cuda.stream(stream),
            _adapter_of_one_row(runner),
            cudagraph_pool.capture_pool(manager.pool, runner.vllm_config) as pool,
        ):
            self._ends.capture(self._all_ends(), pool, stream)
            self._begins.capture(self._sizes, pool, stream)
        # Compiled before steps need them.
        write_block_ids(torch.zeros(2, 0, dtype=torch.int64, device=runner.device), self._groups)
        if self._mixed_sizes:
            self._upload_rows([], [], [], [])
            # With a row of padding: tensors without rows have no address, which Triton takes for an aligned one.
            self._begin_mixed(1, 1, 1)
        stream.synchronize()
        num_bytes = max(free_before - torch.cuda.mem_get_info()[0], 0)
        logger.info(
            "Rose step graph: steps of up to %d requests are replayed whole; %d graphs, %.1f s, %.2f GiB",
            max(self._desc_of, default=0),
            len(self._all_ends()) * (1 if self._replayed is None else 2) + len(self._sizes),
            time.perf_counter() - start,
            num_bytes / (1 << 30),
        )

    def close(self) -> None:
        """Give the graphs back, and the model its own product with the head. Outputs may still be read.

        Raises:
            IntegrityError: nobody asked for the tokens of the last step.
        """
        self._check_nothing_is_pending()
        self._runner.model.compute_logits = self._compute_logits
        self._begins.release()
        self._ends.release()

    def _check_nothing_is_pending(self) -> None:
        if self._pending is not None or self._waiting is not None:
            raise IntegrityError("step graph: the step before was never asked for its tokens")

    def _all_ends(self) -> list[End]:
        kinds = ("greedy",) if self._replayed is None else ("processed", "greedy", "drawn")
        mixed = [("mixed", size) for size in reversed(self._mixed_sizes)]
        return [*((kind, size) for kind in kinds for size in self._sizes), *mixed]

    def launch(self, output: SchedulerOutput) -> bool:
        """Run a step if it can be replayed; else return False, having changed nothing but the count of such steps.

        Raises:
            IntegrityError: nobody asked for the tokens of the step before.
        """
        self._check_nothing_is_pending()
        run = self._run_mixed_layers if has_prompts(output) else self._run_layers
        batch = why_step_is_not_replayed(output) or self._why_state_is_not_replayed(output) or run(output)
        if isinstance(batch, str):
            STEPS.count_vllm(batch)
            self._armed = None
            return False
        self._finished_req_ids = output.finished_req_ids
        if output.has_structured_output_requests:
            self._waiting = batch
            return True
        if batch.end in _ENDS_WITH_MASKS:
            # Masks that a step before has left.
            self._masks.upload(None, batch.index_of)
        self._replay_end(batch, batch.end)
        return True

    def _why_state_is_not_replayed(self, output: SchedulerOutput) -> str | None:
        if output.has_structured_output_requests and self._replayed is None:
            return "structured output without Rose's sampler"
        return None

    def _run_layers(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Run the layers of a step without prompts, and return its batch; or return why the step is vLLM's."""
        batch = self._prepare(output)
        if batch is None:
            return self._run_mixed_layers(output)
        if not isinstance(batch, str):
            self._begins.run(batch.desc.num_tokens)
            self._run_graph_of_layers(batch.desc, batch.desc.num_tokens, output)
        return batch

    def _prepare(self, output: SchedulerOutput) -> ReplayedBatch | str | None:
        """Bring what is new to where graphs read it, and return the batch of a step of decodes only.

        If the step is vLLM's, return why, having changed nothing. None, likewise: prompts end in this step.
        """
        cached, batch = output.scheduled_cached_reqs, self._armed
        is_changed = any(getattr(output, name, None) for name in _FIELDS_OF_CHANGED_BATCHES)
        is_changed = is_changed or self._have_adapters_moved()
        if batch is not None and not is_changed and cached.req_ids == batch.request_ids:
            if output.new_block_ids_to_zero:
                self._runner.kv_block_zeroer.zero_block_ids(output.new_block_ids_to_zero)
            self._append_blocks(batch, cached)
            return batch
        request_ids, adapters = list(cached.req_ids), self._adapters_of(output)
        desc = (self._adapted_desc_of if adapters else self._desc_of).get(len(request_ids))
        if desc is None:
            return "more requests than full graphs of decodes take"
        slot_of = self._runner.req_states.req_id_to_index
        slots = {request_id: slot_of[request_id] for request_id in request_ids}
        slot_array = np.fromiter(slots.values(), np.int64, len(slots))
        if (np.asarray(cached.num_computed_tokens) < self._prefill_lens[slot_array]).any():
            return None
        reason = self._why_vllm_loads(adapters) or self._why_vllm_samples(slot_array)
        if reason is not None:
            return reason
        self._update_requests(output)
        self._set_active_loras(slots, [1] * len(slots))
        rows = torch.full((desc.num_tokens,), NO_SLOT, dtype=torch.int64, pin_memory=self._slots.is_cuda)
        rows.numpy()[: len(slots)] = slot_array
        # torch keeps pinned memory until the copy has run.
        self._slots[: desc.num_tokens].copy_(rows, non_blocking=True)
        self._model_inputs.take_over(slot_array, desc.num_tokens)
        self._armed = self._batch_of(request_ids, desc, desc.num_tokens)
        return self._armed

    def _batch_of(
        self, request_ids: list[str], desc: Any, num_rows_of_end: int, step: MixedStep | None = None
    ) -> ReplayedBatch:
        """Return the batch of requests that the runner knows; ``step`` is what they compute, if it has prompts."""
        slot_of = self._runner.req_states.req_id_to_index
        slots = {request_id: slot_of[request_id] for request_id in request_ids}
        slot_array = np.fromiter(slots.values(), np.int64, len(slots))
        draws = bool(self._temperatures[slot_array].any())
        is_processed = self._replayed is not None and bool(self._replayed.is_changed[slot_array].any())
        if step is not None:
            end = "mixed"
        elif is_processed:
            end = "processed"
        else:
            end = "drawn" if draws else "greedy"
        logprobs = self._sampler.get_logprobs_dims(slot_array)
        is_due = () if step is None else step.is_due
        return ReplayedBatch(
            request_ids,
            end=end,
            draws=draws,
            num_logprobs=None if logprobs is None else logprobs[0],
            desc=desc,
            slots=slots,
            index_of={request_id: index for index, request_id in enumerate(request_ids)},
            num_rows_of_end=num_rows_of_end,
            rows_without_token=tuple(row for row, is_row_due in enumerate(is_due) if not is_row_due),
        )

    def _update_requests(self, output: SchedulerOutput) -> None:
        """Do what vLLM does with a scheduler output before it looks at the step's tokens."""
        runner = self._runner
        runner.finish_requests(output)
        runner.free_states(output)
        runner.add_requests(output)
        runner.update_requests(output)
        for request_id, updates in getattr(output, "encoder_input_updates", {}).items():
            runner.encoder_cache.update_encoder_inputs(request_id, updates)
        runner.block_tables.apply_staged_writes()

    def _adapters_of(self, output: SchedulerOutput) -> set[LoRARequest]:
        """Return the LoRA adapters of a step's requests, of those that it adds, too."""
        runner = self._runner
        if runner.lora_config is None:
            return set()
        added = {new.lora_request for new in output.scheduled_new_reqs if new.lora_request is not None}
        active: set[LoRARequest] = runner.lora_state.get_activate_loras(output.scheduled_cached_reqs.req_ids)
        return active | added

    def _why_vllm_loads(self, adapters: set[LoRARequest]) -> str | None:
        """Return why a step's adapters are vLLM's to load; None if it has all in memory, or the step has none."""
        if not adapters:
            return None
        loaded = self._runner.lora_manager.list_adapters()
        is_missing = any(each.load_inplace or each.lora_int_id not in loaded for each in adapters)
        return "an adapter to load" if is_missing else None

    @torch.inference_mode()
    def _set_active_loras(self, slots: dict[str, int], counts: Sequence[int]) -> None:
        """Tell vLLM's kernels the adapter of each row, and of each token; activate adapters that have been evicted.

        vLLM does this in every step. It waits for the device, so here it is done when the batch or a LoRA slot changes.

        Args:
            slots: of the requests, in the order of rows.
            counts: tokens of each row.
        """
        runner = self._runner
        if runner.lora_config is None:
            return
        inputs = runner.lora_state.make_lora_inputs(
            list(slots), np.fromiter(slots.values(), np.int64, len(slots)), np.asarray(counts, np.int32)
        )
        runner._set_active_loras(*inputs)
        self._lora_slots = list(runner.model.lora_manager.lora_index_to_id)

    def _have_adapters_moved(self) -> bool:
        """Whether an adapter has entered or left a LoRA slot since kernels were last told those of the rows."""
        runner = self._runner
        return (
            runner.lora_config is not None and runner.model.lora_manager.lora_index_to_id != self._lora_slots
        )

    def _run_mixed_layers(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Run the layers of a step with prompts, and return its batch.

        If the step is vLLM's, return why, having changed nothing.
        """
        adapters = self._adapters_of(output)
        reason = self._why_vllm_loads(adapters) or self._why_prompts_are_not_replayed(output)
        if reason is not None:
            return reason
        step = self._describe(output)
        num_tokens, uniform = output.total_num_scheduled_tokens, 1 if step.has_single_tokens else None
        # As vLLM's: not told where a row computes part of a prompt.
        max_query_len = None if any(step.is_prompt) else step.counts[-1]
        desc = self._manager.dispatch(len(step.counts), num_tokens, uniform, len(adapters), max_query_len)
        size = size_for(self._mixed_sizes, len(step.counts))
        if size is None:
            return "more requests than full graphs of decodes take"
        if desc.cg_mode != CUDAGraphMode.FULL or desc not in self._manager.graphs:
            return "prompts without a full graph"
        self._armed = None
        self._update_requests(output)
        batch = self._batch_of(step.request_ids, desc, size, step)
        self._set_active_loras(batch.slots, step.counts)
        self._upload_rows(list(batch.slots.values()), step.counts, step.is_prompt, step.is_due)
        num_rows = desc.num_reqs or desc.num_tokens
        # The end may have more rows than the graph.
        self._begin_mixed(max(num_rows, size), desc.num_tokens, step.counts[-1])
        self._model_inputs.prepare(self._inputs, step, desc.num_tokens, output)
        self._run_graph_of_layers(desc, num_rows, output)
        return batch

    def _describe(self, output: SchedulerOutput) -> MixedStep:
        slot_of, cached = self._runner.req_states.req_id_to_index, output.scheduled_cached_reqs
        # Of each request: tokens computed before, and tokens that are known from the start.
        lens = {
            request_id: (num_computed, int(self._prefill_lens[slot_of[request_id]]))
            for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        }
        for new in output.scheduled_new_reqs:
            lens[new.req_id] = new.num_computed_tokens, len(new.prefill_token_ids)
        # vLLM's order, so that both kinds of steps compute the same.
        request_ids = sort_batch_req_ids(output.num_scheduled_tokens, {}, 1)
        counts = [output.num_scheduled_tokens[request_id] for request_id in request_ids]
        starts, ends = zip(*(lens[request_id] for request_id in request_ids), strict=True)
        is_prompt = [start < end for start, end in zip(starts, ends, strict=True)]
        return MixedStep(
            request_ids,
            counts,
            num_computed_tokens=list(starts),
            prefill_lens=list(ends),
            is_prompt=is_prompt,
            is_due=[start + count >= end for start, count, end in zip(starts, counts, ends, strict=True)],
            has_single_tokens=counts[-1] == 1
            and all(start > 0 for start, is_one in zip(starts, is_prompt, strict=True) if is_one),
        )

    def _why_prompts_are_not_replayed(self, output: SchedulerOutput) -> str | None:
        """Return what a step with prompts has that is vLLM's; None if nothing."""
        if self._replayed is None:
            return "prompts without Rose's sampler"
        if self._model_inputs.is_prepared_by_vllm:
            return "prompts of a model audited for decodes only"
        if self._groups.has_states:
            return "prompts of a model with states"
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is None or new.prefill_token_ids is None:
                return "requests without tokens"
            if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
                return "log-probabilities of prompts"
            num_logprobs = self._runner.vocab_size if params.logprobs == -1 else params.logprobs or 0
            reason = why_graphs_do_not_report(
                self._sampler, num_logprobs, len(params.logprob_token_ids or ())
            )
            if reason is not None and (params.logprobs is not None or params.logprob_token_ids):
                return reason
        cached, slot_of = output.scheduled_cached_reqs, self._runner.req_states.req_id_to_index
        slots = np.fromiter((slot_of[each] for each in cached.req_ids), np.int64, len(cached.req_ids))
        prompts = self._runner.prompt_logprobs_worker
        is_prompt = np.asarray(cached.num_computed_tokens, np.int64) < self._prefill_lens[slots]
        if (prompts.uses_prompt_logprobs[slots] & is_prompt).any() or prompts.token_id_scores:
            return "log-probabilities of prompts"
        return self._why_vllm_samples(slots) if len(slots) else None

    def _upload_rows(
        self, slots: list[int], counts: list[int], is_prompt: list[bool], is_due: list[bool]
    ) -> None:
        """Copy to the device what a mixed step computes; rows after these are padding."""
        on_cpu, record = self._row_inputs.begin()
        num_rows = len(slots)
        for name, values, padding in (
            ("slots", slots, NO_SLOT),
            ("is_prompt", is_prompt, 0),
            ("is_due", is_due, 0),
        ):
            record[name][:num_rows] = values
            record[name][num_rows:] = padding
        ends = record["query_start_loc"]
        ends[0] = 0
        np.cumsum(counts, out=ends[1 : num_rows + 1])
        ends[num_rows + 1 :] = sum(counts)
        self._row_inputs.send(on_cpu)

    def _begin_mixed(self, num_rows: int, num_tokens: int, max_query_len: int) -> None:
        """Write the inputs of a step with prompts, of ``num_rows`` rows and ``num_tokens`` tokens with padding."""
        first, *others = (
            each.get_metadata_builder().take_computed_tokens()
            for of_group in self._runner.attn_groups
            for each in of_group
        )
        begin_mixed_step(
            self._rows.first(num_rows),
            self._state,
            self._inputs,
            self._groups,
            first,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            padding_slot=self._runner.max_num_reqs,
        )
        for other in others:
            other.copy_(first)

    def _why_vllm_samples(self, slots: NDArray[np.int64]) -> str | None:
        """Return why the tokens of requests are vLLM's to sample; None if an end can."""
        logprobs = self._sampler.get_logprobs_dims(slots)
        if self._replayed is not None:
            return None if logprobs is None else why_graphs_do_not_report(self._sampler, *logprobs)
        reasons = {
            "log-probabilities without Rose's sampler": logprobs is not None,
            "random draws by vLLM's sampler": self._temperatures[slots].any(),
            "logits processors without Rose's sampler": self._sampler.needs_logits_processing[slots].any(),
        }
        return first_reason(reasons)

    def take_output(self, grammar_output: Any) -> ReplayedOutput | None:
        """Return the output of the step that was launched last; None if that step was vLLM's.

        Args:
            grammar_output: vLLM's masks for a step with structured output; None if no request has any.

        Raises:
            IntegrityError: masks for a step that was sampled without, or for requests that are not in it.
        """
        if self._waiting is not None:
            batch, self._waiting = self._waiting, None
            self._masks.upload(grammar_output, batch.index_of)
            self._replay_end(batch, batch.end if batch.end in _ENDS_WITH_MASKS else "processed")
        elif self._pending is not None and grammar_output is not None:
            raise IntegrityError("step graph: a replayed step got a grammar, and was sampled without")
        output, self._pending = self._pending, None
        if output is not None:
            # Behind all that the step has launched, as in vLLM: it starts loads, submits stores and asks what is done.
            output.kv_connector_output = self._runner.kv_connector.post_forward(self._finished_req_ids)
        return output

    def note_vllm_step(self) -> None:
        """Let vLLM's next product of a step's last tokens have as many rows as an end's."""
        self._padded_rows = self._padded_last_rows = 0
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return
        batch, hidden = state.input_batch, state.hidden_states
        is_replayed = hidden.data_ptr() == self._manager.hidden_states.data_ptr()
        is_decode = batch.num_tokens == batch.num_reqs and batch.num_reqs in self._desc_of
        # Replayed, a prompt's last token alone ends like all steps with prompts.
        if (
            is_replayed
            and is_decode
            and not batch.has_prefill
            and len(hidden) == self._desc_of[batch.num_reqs].num_tokens
        ):
            self._padded_rows = batch.num_reqs
        elif self._mixed_sizes and batch.num_reqs <= self._mixed_sizes[-1]:
            self._padded_last_rows = batch.num_reqs

    def _compute_padded_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_rows, self._padded_rows = self._padded_rows, 0
        num_last_rows, self._padded_last_rows = self._padded_last_rows, 0
        if args or kwargs or len(hidden_states) not in (num_rows, num_last_rows) or not len(hidden_states):
            return self._compute_logits(hidden_states, *args, **kwargs)
        if num_rows:
            size = self._desc_of[num_rows].num_tokens
            return self._compute_logits(self._manager.hidden_states[:size])[:num_rows]
        size = size_for(self._mixed_sizes, num_last_rows)
        self._last_hidden[:num_last_rows].copy_(hidden_states)
        return self._compute_logits(self._last_hidden[:size])[:num_last_rows]

    def _append_blocks(self, batch: ReplayedBatch, cached: CachedRequestData) -> None:
        """Append new blocks to the rows of requests, as vLLM's ``append_block_ids`` and ``apply_staged_writes`` do.

        In a busy engine some request fills a block in almost every step. vLLM stages the writes of each row apart and
        launches a Triton kernel over them: 91 us of the CPU's time for 32 rows of 256 (beside an H200), where one copy
        and two small kernels take 63; with several KV cache groups it is one copy and one kernel. vLLM's own count of
        blocks goes to the device with its next step. Columns that a sliding window has passed stay as they are, as in
        vLLM's steps: attention reads no column before the window.
        """
        if not any(cached.new_block_ids):
            return
        grown = [
            (request_id, batch.slots[request_id], block_ids)
            for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if block_ids is not None
        ]
        places: list[int] = []
        new_blocks: list[int] = []
        for index, group in enumerate(self._groups.groups):
            num_blocks = self._runner.block_tables.num_blocks.np[index]
            first_entry, width = self._groups.first_entries[index], group.state_table.shape[1]
            for request_id, slot, of_groups in grown:
                block_ids = of_groups[index]
                start = int(num_blocks[slot])
                end = start + len(block_ids)
                if end > width:
                    raise IntegrityError(
                        f"step graph: request {request_id} gets blocks {start} to {end}, a row has {width}"
                    )
                row = first_entry + slot * width
                places.extend(range(row + start, row + end))
                new_blocks.extend(block_ids)
                num_blocks[slot] = end
        # torch keeps pinned memory until the copy has run.
        writes = torch.tensor([places, new_blocks], dtype=torch.int64, pin_memory=self._slots.is_cuda)
        write_block_ids(writes.to(self._slots.device, non_blocking=True), self._groups)

    def _run_graph_of_layers(self, desc: Any, num_rows: int, output: SchedulerOutput) -> None:
        tables, connector = self._runner.block_tables, self._runner.kv_connector
        if hasattr(tables, "_num_dirty_rows"):
            # From vLLM 0.33 on: rows of the step's table that its next step clears where they are padding then.
            tables._num_dirty_rows = max(tables._num_dirty_rows, num_rows)
        # Without vLLM's input batch, which connectors outside of layers do not read.
        connector.pre_forward(output)
        self._manager.run_fullgraph(desc)
        connector.finish_forward()

    def _replay_end(self, batch: ReplayedBatch, end: str) -> None:
        has_report = batch.num_logprobs is not None
        self._ends.run((end, batch.num_rows_of_end), 2 if has_report else 1)
        self._pending = self._buffers.copy(batch, self._tokens, self._record.words if has_report else None)
        STEPS.count_rose()
        if batch.draws:
            SAMPLES.count_rose(len(batch.request_ids))

    def _begin(self, size: int, _: None) -> None:
        """Write the inputs of a step."""
        slots, padding_slot = self._slots[:size], self._runner.max_num_reqs
        begin_decode_step(slots, self._state, self._inputs, self._groups, padding_slot=padding_slot)
        self._model_inputs.write(self._inputs, size)
        for written, copy in self._copies:
            copy[:size].copy_(written[:size])

    def _end(self, end: End, _: None) -> torch.Tensor:
        """Sample a step and append its tokens; return the logits, [R, V], of which log-probabilities are reported."""
        kind, size = end
        inputs, tokens = self._inputs, self._tokens[:size]
        if kind == "mixed":
            rows = self._rows.first(size)
            # Of each row. Rows of padding read some token.
            last = (rows.query_start_loc[1:] - 1).clamp_(min=0)
            hidden, slots = self._last_hidden[:size], rows.slots
            torch.index_select(self._manager.hidden_states, 0, last, out=hidden)
            positions, input_ids = inputs.positions[last], inputs.input_ids[last]
        else:
            rows, hidden, slots = None, self._manager.hidden_states[:size], self._slots[:size]
            positions, input_ids = inputs.positions[:size], inputs.input_ids[:size]
        logits = self._compute_logits(hidden)
        if kind == "greedy":
            tokens.copy_(logits.argmax(dim=-1))
        else:
            self._draw(logits, tokens, positions, input_ids, is_processed=kind in _ENDS_WITH_MASKS)
        end_step(slots, tokens, self._state, rows)
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        *,
        is_processed: bool,
    ) -> None:
        assert self._replayed is not None
        request_slots = self._inputs.request_slots[: len(tokens)]

        def process(logits: torch.Tensor, part: slice) -> None:
            self._processors.apply(logits, request_slots[part], positions[part], input_ids[part])

        if is_processed:
            self._masks.apply(logits)
        self._replayed.graphs.compute(
            logits, request_slots, positions, tokens, process if is_processed else None
        )

    def _report(self, end: End, logits: torch.Tensor) -> None:
        """Report the tokens that a step has sampled from ``logits``."""
        assert self._replayed is not None
        _, size = end
        num_logprobs = self._replayed.graphs.parameters["num_logprobs"]
        of_rows = num_logprobs.index_select(0, self._inputs.request_slots[:size])
        self._record.write(logits, self._tokens[:size], of_rows)


def _adapter_of_one_row(runner: Any) -> AbstractContextManager[None]:
    """Return a context in which ends are captured: with LoRA, the first row has an adapter.

    Captured kernels skip rows without one. vLLM's write all rows that they are told of, though a smaller batch has
    fewer: so no more than the smallest end has.
    """
    counts = np.ones(1, np.int32)
    context: AbstractContextManager[None] = runner.maybe_dummy_run_with_lora(
        runner.lora_config, counts, None, num_active_loras=1
    )
    return context


def _decode_graphs(manager: Any, max_num_reqs: int, *, num_adapters: int) -> dict[int, Any]:
    """Return vLLM's descriptor of the full decode graph for each number of requests that has one."""
    found = {}
    for num_requests in range(1, max_num_reqs + 1):
        desc = manager.dispatch(num_requests, num_requests, 1, num_adapters, 1)
        if desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == 1 and desc in manager.graphs:
            found[num_requests] = desc
    return found


def _state_of(runner: Any) -> StepState:
    states = runner.req_states
    return StepState(
        num_computed_tokens=states.num_computed_tokens.gpu,
        last_tokens=states.last_sampled_tokens.view(-1),
        total_lens=states.total_len.gpu,
        token_ids=states.all_token_ids.gpu,
        output_counts=runner.sampler.penalties_state.output_bin_counts,
    )


def _row_inputs(num_rows: int, device: torch.device) -> FixedInputs:
    """Return what ``MixedRows`` of up to ``num_rows`` rows are read from."""
    one = (num_rows,)
    return FixedInputs(
        {
            "slots": (np.int64, one),
            "query_start_loc": (np.int32, (num_rows + 1,)),
            "is_prompt": (np.int32, one),
            "is_due": (np.int32, one),
        },
        device,
    )


def _inputs_of(runner: Any, num_rows: int) -> StepInputs:
    buffers = runner.input_buffers
    return StepInputs(
        input_ids=buffers.input_ids,
        positions=buffers.positions,
        seq_lens=buffers.seq_lens,
        query_start_loc=buffers.query_start_loc,
        is_padding=buffers.is_padding,
        request_slots=torch.zeros(num_rows, dtype=torch.int32, device=runner.device),
    )


def _groups_of(runner: Any) -> StepGroups:
    """Return the runner's KV cache groups, each with what the first of its metadata builders lets layers read."""
    tables = runner.block_tables
    groups: list[StepGroup | StateGroup] = []
    for index, of_group in enumerate(runner.attn_groups):
        builder = of_group[0].get_metadata_builder()
        state_table, block_size = tables.block_tables[index].gpu, tables.block_sizes[index]
        if type(builder) in STATE_BUILDERS:
            last_columns = runner.model_state._mamba_state_idx_gpu
            groups.append(StateGroup(state_table, _state_blocks_of(builder), last_columns, block_size))
            continue
        group = StepGroup(
            state_table=state_table,
            block_table=tables.input_block_tables[index],
            slot_mapping=tables.slot_mappings[index],
            num_computed_tokens=builder.decode_computed_tokens,
            block_size=block_size,
        )
        groups.append(group)
    return StepGroups(*groups)


def _state_blocks_of(builder: Any) -> torch.Tensor:
    """Return the block of each row's state, [T] int32: without drafts a row has one."""
    blocks: torch.Tensor = getattr(builder, STATE_BUILDERS[type(builder)][0])
    return blocks.view(-1)


def _copies_of(runner: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what the prologue writes, by row, and what else must hold the same.

    Layers of several shapes in one KV cache group (Gemma 4) have a metadata builder each.
    """
    copies = []
    for of_group in runner.attn_groups:
        builders = [each.get_metadata_builder() for each in of_group]
        is_state = type(builders[0]) in STATE_BUILDERS
        first, *others = (
            _state_blocks_of(each) if is_state else each.decode_computed_tokens for each in builders
        )
        copies += [(first, other) for other in others]
        for each in builders if is_state else ():
            if (name := STATE_BUILDERS[type(each)][1]) is not None:
                # The first entry stays 0.
                copies.append((runner.input_buffers.query_start_loc[1:], getattr(each, name)[1:]))
    return copies


PROFILED_GRAPHS = 9
"""Full graphs that are captured to estimate the memory of all; vLLM's own choice is the two largest.

vLLM takes what the second largest needed, at least 1 MiB, for what every other one needs. But the memory pool still
grows with the first graphs, in steps of up to 20 MiB, and most of the others find room in it, or even less is in use
after them. What is estimated too high is missing in the KV cache.
"""
_LARGEST = 3
"""How many of them are the largest, with which the memory pool grows; the others are spread over all other sizes."""


def wrap_capture_model(original: Callable[..., int]) -> Callable[..., int]:
    """Build the replacement of ``GPUModelRunner.capture_model``; see the patch ledger."""

    @functools.wraps(original)
    def capture_model(self: Any, *args: Any, profile_only: bool = False, **kwargs: Any) -> int:
        manager = self.cudagraph_manager
        is_on = rose_options(self.vllm_config).step_graph
        reason = why_engine_is_not_replayed(self) if is_on else "off"
        if is_on and reason is not None and not profile_only:
            logger.info("Rose step graph is off: %s", reason)
        streams: list[torch.cuda.Stream] = []
        if not profile_only:
            _drop_steps(manager)
        with (
            _spread_samples(manager) if profile_only else nullcontext(),
            _room_for_logits(self, streams) if reason is None else nullcontext(),
        ):
            num_bytes = original(self, *args, profile_only=profile_only, **kwargs)
        if reason is None and not profile_only:
            _capture_steps(self, streams[0])
        return num_bytes

    return capture_model


_MOST_NAMES = 20
"""That the log gives of what has moved."""


def _capture_steps(runner: Any, stream: torch.cuda.Stream) -> StepGraphs:
    steps = StepGraphs(runner)
    steps.capture(stream)
    # Attributes of the graphs' owner, so that they go when it does.
    manager = runner.cudagraph_manager
    manager.rose_step_graphs = steps
    manager.rose_graph_addresses = GraphAddresses(runner)
    return steps


def _drop_steps(manager: Any) -> None:
    steps = vars(manager).pop("rose_step_graphs", None)
    if steps is not None:
        del manager.rose_graph_addresses
        steps.close()


def _steps_of(runner: Any) -> StepGraphs | None:
    """Return the runner's steps, captured again if something that graphs hold has moved; None if it has none."""
    manager = runner.cudagraph_manager
    steps: StepGraphs | None = getattr(manager, "rose_step_graphs", None)
    if steps is None or not manager.rose_graph_addresses.may_differ:
        return steps
    moved = manager.rose_graph_addresses.find_moved()
    # Ranks capture together.
    stale = largest_of_ranks(which_graphs_hold(moved))
    if stale == StaleGraphs.NONE:
        manager.rose_graph_addresses.may_differ = False
        return steps
    logger.warning(
        "Rose step graph: %s captured again, because %d tensors of this rank have moved: %s",
        "vLLM's graphs and Rose's are" if stale == StaleGraphs.ALL else "Rose's graphs are",
        len(moved),
        ", ".join([*moved[:_MOST_NAMES], *["..."] * (len(moved) > _MOST_NAMES)]),
    )
    torch.accelerator.synchronize()
    # As at start-up.
    with torch.inference_mode(False), set_current_vllm_config(runner.vllm_config):
        if stale == StaleGraphs.ROSES:
            _drop_steps(manager)
            return _capture_steps(runner, steps.stream)
        # vLLM's own layers look their weights up when they are captured. By itself vLLM captures nothing again.
        if (take_moved_weights := getattr(runner.model, "take_moved_weights", None)) is not None:
            take_moved_weights()
        CUDAGraphWrapper.clear_all_graphs()
        manager.release_graphs()
        runner.capture_model()
    return getattr(manager, "rose_step_graphs", None)


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner.execute_model``; see the patch ledger."""

    @functools.wraps(original)
    def execute_model(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        steps = _steps_of(self)
        if (
            steps is not None
            and intermediate_tensors is None
            and not args
            and not kwargs
            and steps.launch(scheduler_output)
        ):
            return None
        return original(self, scheduler_output, intermediate_tensors, *args, **kwargs)

    return execute_model


def wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner.sample_tokens``; see the patch ledger."""

    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        steps = getattr(self.cudagraph_manager, "rose_step_graphs", None)
        if steps is not None:
            output = steps.take_output(grammar_output)
            if output is not None:
                return output
            steps.note_vllm_step()
        return original(self, grammar_output)

    return sample_tokens


@contextmanager
def _spread_samples(manager: Any) -> Iterator[None]:
    """Let vLLM sample graphs of all sizes, and hand it samples from which it computes the right sum.

    Args:
        manager: vLLM's ``CudaGraphManager``, in ``profile_cudagraph_memory``.
    """
    full = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    if len(full) <= PROFILED_GRAPHS:
        yield
        return
    num_spread = PROFILED_GRAPHS - _LARGEST
    spread = [_LARGEST + (len(full) - 1 - _LARGEST) * nth // num_spread for nth in range(1, num_spread + 1)]
    manager._capture_descs[CUDAGraphMode.FULL] = [*full[:_LARGEST], *(full[index] for index in spread)]
    manager._max_full_descs_to_capture = PROFILED_GRAPHS
    try:
        yield
    finally:
        manager._capture_descs[CUDAGraphMode.FULL] = full
    samples = manager._capture_mem_samples
    each = max(int(statistics.median(samples[_LARGEST:])), 0)
    others = (len(full) - len(samples)) * each
    # vLLM takes the sum of the samples off what all of this took, and adds what it extrapolates from the first two.
    extrapolated = _extrapolate_full_graph_memory([0, each], len(full))
    samples[:] = [0, each, extrapolated - each - others]


@contextmanager
def _room_for_logits(runner: Any, streams: list[torch.cuda.Stream]) -> Iterator[None]:
    """Let activations of vLLM's graphs lie where an end's logits lie later in the step.

    Graphs find memory of others in their pool only where both were captured on one stream. Logits are the largest
    tensor of a step, so they go first: activations find room in theirs, but not the other way round.

    Args:
        streams: gets the one that vLLM captures on.
    """
    manager = runner.cudagraph_manager
    choose_stream = manager._capture_stream
    most = max(desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL])
    shape = (min(most, runner.max_num_reqs), runner.model_config.get_hidden_size())
    hidden_states = torch.zeros(shape, dtype=runner.dtype, device=runner.device)
    logits = CapturedGraphs[int](lambda size, _: runner.model.compute_logits(hidden_states[:size]))

    def capture_logits_first(desc: Any) -> torch.cuda.Stream:
        stream = choose_stream(desc)
        if not streams:
            streams.append(stream)
            with cudagraph_pool.capture_pool(manager.pool, runner.vllm_config) as pool:
                logits.capture([len(hidden_states)], pool, stream)
        return stream

    manager._capture_stream = capture_logits_first
    try:
        yield
    finally:
        del manager._capture_stream
