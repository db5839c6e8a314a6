"""Full CUDA graphs of mixed steps (decodes and prefills together), attention included.

vLLM replays such steps as piecewise graphs, with attention called from Python between the pieces, and only up to 512
tokens. Steps of a busy server have more, so they are launched kernel by kernel, which takes most of the time of small
models. Rose's attention decides on the device which rows decode, so one graph serves any mix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rose_backend.kernels.attention.ops import MAX_QUERY_LEN
from rose_backend.kernels.tuning.measured import constants
from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.attention.flash_attention import LAUNCHED_FROM, uses_flash_attention
from rose_backend.vllm_plugin.options import (
    OTHER_DRAFTER,
    depths_of,
    first_reason,
    has_connector_in_layers,
    has_head,
    has_other_drafter,
    is_rose_selected,
    rose_options,
    why_adapters_need_vllms_steps,
)
from rose_backend.vllm_plugin.registration import is_rose

MAX_GRAPH_WORK = constants("graphs of mixed steps")["max_work"]
"""Tokens of the largest graph times the square of the model's hidden size, to which a layer's device time is about
proportional. In longer steps the device is busy while the CPU launches."""

_SIZES_PER_DOUBLING = 8
"""Graph sizes above vLLM's own, which end at 512 tokens. At most an eighth of a step is padding."""


def captures_mixed_steps(vllm_config: VllmConfig) -> bool:
    """Whether ROSE is selected, and full graphs of mixed steps support every step of this configuration."""
    return is_rose_selected(vllm_config) and why_mixed_steps_are_not_captured(vllm_config) is None


def why_mixed_steps_are_not_captured(vllm_config: VllmConfig) -> str | None:
    """Return what in the configuration keeps full graphs of mixed steps from being captured; None if nothing does."""
    model_config = vllm_config.model_config
    reasons = {
        "no CUDA device": not current_platform.is_cuda(),
        "cuda_graph is off": not rose_options(vllm_config).cuda_graph,
        "model runner V1": not vllm_config.use_v2_model_runner,
        "layers with a state": model_config is not None and model_config.is_hybrid,
        "another attention backend for some layers": bool(vllm_config.attention_config.backend_per_kind),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    return (
        first_reason(reasons)
        or why_drafter_needs_vllms_graphs(vllm_config)
        or why_adapters_need_vllms_steps(vllm_config)
        or why_prompts_need_python(vllm_config)
    )


def why_drafter_needs_vllms_graphs(vllm_config: VllmConfig) -> str | None:
    """Return why graphs of any mix cannot be captured beside the drafter of this configuration; None if they can.

    vLLM captures the head's first forward pass with the same batch sizes and graph mode as the model's step.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_head(vllm_config):
        return OTHER_DRAFTER if has_other_drafter(vllm_config) else None
    backend, unaudited = speculative.attention_backend, find_unaudited(speculative.draft_model_config)
    reasons = {
        "another attention backend for the drafter": backend is not None and not is_rose(backend),
        # Not tried.
        "enable_adaptive_verification": speculative.enable_adaptive_verification,
        "num_speculative_tokens_per_batch_size": bool(speculative.num_speculative_tokens_per_batch_size),
        # Features of images would have to be in the drafter's buffer before a replay.
        "a head beside images": vllm_config.model_config.is_multimodal_model,
        f"{unaudited} is not among the audited models": unaudited is not None,
    }
    return first_reason(reasons)


def why_prompts_need_python(vllm_config: VllmConfig) -> str | None:
    """Return what Python, which no replayed graph calls, may have to do in steps with prompts; None if nothing."""
    model_config = vllm_config.model_config
    if model_config is None:
        return "no model"
    unaudited = find_unaudited(model_config)
    if unaudited is not None:
        return f"{unaudited} is not among the audited models"
    if has_connector_in_layers(vllm_config):
        return "a KV connector that works layer by layer"
    return None


def has_default_graph_options(vllm_config: VllmConfig) -> bool:
    """Whether the user has set no CUDA graph option. Call it before vLLM fills in its defaults."""
    compilation = vllm_config.compilation_config
    options = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
    return all(getattr(compilation, name) is None for name in options)


def choose_mixed_graphs(vllm_config: VllmConfig) -> None:
    """Replace FULL_AND_PIECEWISE by FULL graphs of more sizes for decodes and mixed steps."""
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE or not captures_mixed_steps(
        vllm_config
    ):
        return
    sizes = graph_sizes(
        compilation.cudagraph_capture_sizes,
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.model_config.get_hidden_size(),
    )
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]


def graph_sizes(vllm_sizes: Sequence[int], max_num_batched_tokens: int, hidden_size: int) -> list[int]:
    """Return ``vllm_sizes``, ascending, and larger ones up to the token budget or ``MAX_GRAPH_WORK``."""
    sizes = list(vllm_sizes)
    largest = min(max_num_batched_tokens, MAX_GRAPH_WORK // hidden_size**2)
    while sizes[-1] < largest:
        power_of_two = 1 << (sizes[-1].bit_length() - 1)
        step = max(power_of_two // _SIZES_PER_DOUBLING, 16)
        # The budget itself is a common size: steps are filled up with prompts.
        sizes.append(min(sizes[-1] // step * step + step, largest))
    return sizes


def wrap_init_candidates(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``CudaGraphManager._init_candidates``; see the patch ledger."""

    def _init_candidates(self: Any) -> None:
        original(self)
        if self.cudagraph_mode == CUDAGraphMode.FULL and captures_mixed_steps(self.vllm_config):
            add_decode_graphs(self)
            # Data-parallel ranks agree on tokens, not on requests: some would find a graph and others none.
            if uses_flash_attention(self.vllm_config) and self.dp_size == 1:
                launch_long_prefills(self)
        elif self.decode_query_len == 1 and captures_passes(self.vllm_config):
            capture_some_passes(self)

    return _init_candidates


def add_decode_graphs(manager: Any) -> None:
    """Capture graphs for decode-only steps, too, and prefer them: they need no prefill attention.

    All rows of such a step have a token and, beside drafts, as many of them as are asked for; or fewer, where some may
    be left out. There are none where these are more than decode attention takes: such rows are prompts to attention.

    Args:
        manager: vLLM's ``CudaGraphManager`` whose graphs are all full ones for mixed steps.
    """
    mixed = list(manager._capture_descs.get(CUDAGraphMode.FULL, []))
    most = manager.decode_query_len
    query_lens = [1 + depth for depth in depths_of(manager.vllm_config)] if most > 1 else [1]
    for query_len in query_lens:
        if query_len <= MAX_QUERY_LEN:
            _add_decode_graphs_of(manager, mixed, query_len)


def captures_passes(vllm_config: VllmConfig) -> bool:
    """Whether vLLM captures the passes of a head after its first one as one graph, and Rose the steps before."""
    return has_head(vllm_config) and captures_mixed_steps(vllm_config)


def capture_some_passes(manager: Any) -> None:
    """Capture the passes of a head after its first one for each number of drafts that a step may make.

    vLLM does so where a schedule by batch size is configured, and otherwise has one graph of all passes.

    Args:
        manager: vLLM's ``SpeculatorCudaGraphManager`` of these passes.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

    depths = [depth for depth in depths_of(manager.vllm_config) if depth > 1]
    if len(depths) > 1:
        manager._capture_descs = {
            mode: [
                SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=depth)
                for desc in descs
                for depth in reversed(depths)
            ]
            for mode, descs in manager._capture_descs.items()
        }


def _add_decode_graphs_of(manager: Any, mixed: list[Any], query_len: int) -> None:
    """Capture graphs for steps whose rows have ``query_len`` tokens each, of about the sizes of ``mixed``."""
    largest = max((desc.num_tokens for desc in mixed), default=0)
    most = min(manager.max_num_reqs, largest // query_len)
    decodes = {}
    for desc in mixed:
        # The largest batch has a graph whether or not its size is among those of mixed steps.
        num_rows = min(-(-desc.num_tokens // query_len), most)
        rounded = replace(
            desc, num_tokens=num_rows * query_len, num_reqs=num_rows, uniform_token_count=query_len
        )
        decodes[rounded] = rounded.num_tokens, rounded.num_active_loras
    descs = [*manager._capture_descs[CUDAGraphMode.FULL], *decodes]
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(descs, key=lambda desc: desc.num_tokens, reverse=True)
    # With LoRA each size has a graph without adapters, too.
    decode_of = {size: desc for desc, size in decodes.items()}
    sizes = sorted({num_tokens for num_tokens, _ in decode_of})
    for (num_tokens, num_active_loras), candidates in manager._candidates.items():
        if (index := bisect_left(sizes, num_tokens)) < len(sizes):
            candidates.insert(0, decode_of[sizes[index], num_active_loras])


def launch_long_prefills(manager: Any) -> None:
    """Replay no graph of mixed steps where rows are so long that FlashAttention 3 may be faster.

    A graph's kernels are chosen before its rows are known. vLLM looks through the candidates for a number of tokens in
    order: the first one that has room for the requests is taken, and one without a graph means launches.

    Args:
        manager: vLLM's ``CudaGraphManager`` whose graphs are all full ones.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    for (num_tokens, num_active_loras), candidates in manager._candidates.items():
        candidates[:0] = [
            BatchExecutionDescriptor(
                CUDAGraphMode.NONE, num_tokens, num_requests, num_active_loras=num_active_loras
            )
            for num_requests in range(1, num_tokens // LAUNCHED_FROM + 1)
        ]
