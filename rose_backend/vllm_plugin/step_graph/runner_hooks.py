"""Where replayed steps enter vLLM's model runner V2: capture, execution and sampling of a step."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.compilation import cudagraph_pool
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, _extrapolate_full_graph_memory

from rose_backend.kernels.captured_graphs import CapturedGraphs
from rose_backend.vllm_plugin.models.eagle3 import RoseEagle3LlamaForCausalLM
from rose_backend.vllm_plugin.options import depths_of, rose_options
from rose_backend.vllm_plugin.plugin_logger import logger
from rose_backend.vllm_plugin.step_graph.addresses import (
    GraphAddresses,
    StaleGraphs,
    largest_of_ranks,
    which_graphs_hold,
)
from rose_backend.vllm_plugin.step_graph.draft_steps import AdaptiveSteps, DraftSteps, max_num_logits
from rose_backend.vllm_plugin.step_graph.head_steps import HeadSteps, PlainHeadSteps, StoringHeadSteps
from rose_backend.vllm_plugin.step_graph.reasons import HEADS, why_engine_is_not_replayed
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from rose_backend.vllm_plugin.step_graph.whole_steps import WholeSteps

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


def _capture_steps(runner: Any, stream: torch.cuda.Stream) -> WholeSteps | AdaptiveSteps:
    steps = _make_steps(runner)
    steps.capture(stream)
    # Attributes of the graphs' owner, so that they go when it does.
    manager = runner.cudagraph_manager
    manager.rose_step_graphs = steps
    manager.rose_graph_addresses = GraphAddresses(runner)
    return steps


def _make_steps(runner: Any) -> WholeSteps | AdaptiveSteps:
    if runner.speculative_config is None:
        return StepGraphs(runner)
    is_head = type(runner.speculator) in HEADS
    kind = HeadSteps if is_head else DraftSteps
    by_depth = {
        depth: kind(runner, depth) if depth else _plain_steps_kind(runner, is_head=is_head)(runner)
        for depth in depths_of(runner.vllm_config)
    }
    return AdaptiveSteps(by_depth) if len(by_depth) > 1 else next(iter(by_depth.values()))


def _plain_steps_kind(runner: Any, *, is_head: bool) -> type[StepGraphs]:
    """Return the steps without drafts of an engine that leaves drafts out at times."""
    if not is_head:
        return StepGraphs
    return (
        StoringHeadSteps
        if isinstance(runner.speculator.model, RoseEagle3LlamaForCausalLM)
        else PlainHeadSteps
    )


def managers_of(runner: Any) -> list[Any]:
    """Return vLLM's managers of the graphs of a runner's layers, and of its drafter's."""
    of_drafter = () if runner.speculator is None else vars(runner.speculator).values()
    return [runner.cudagraph_manager, *(each for each in of_drafter if isinstance(each, CudaGraphManager))]


def _drop_steps(manager: Any) -> None:
    steps = vars(manager).pop("rose_step_graphs", None)
    if steps is not None:
        del manager.rose_graph_addresses
        steps.close()


def _steps_of(runner: Any) -> WholeSteps | AdaptiveSteps | None:
    """Return the runner's steps, captured again if something that graphs hold has moved; None if it has none.

    With data-parallel ranks that run steps together it has none from then on.
    """
    manager = runner.cudagraph_manager
    steps: WholeSteps | AdaptiveSteps | None = getattr(manager, "rose_step_graphs", None)
    if steps is None or not manager.rose_graph_addresses.may_differ:
        return steps
    moved = manager.rose_graph_addresses.find_moved()
    # Ranks capture together.
    stale = largest_of_ranks(which_graphs_hold(moved))
    if stale == StaleGraphs.NONE:
        manager.rose_graph_addresses.may_differ = False
        return steps
    names = ", ".join([*moved[:_MOST_NAMES], *["..."] * (len(moved) > _MOST_NAMES)])
    torch.accelerator.synchronize()
    if runner.dp_size > 1:
        # While graphs are captured, experts wait for all data-parallel ranks, of which others may be in the middle of a
        # step. vLLM's own graphs are as they would be without Rose.
        logger.warning(
            "Rose step graph: steps of this rank are vLLM's from now on, because %d tensors have moved: %s",
            len(moved),
            names,
        )
        _drop_steps(manager)
        return None
    logger.warning(
        "Rose step graph: %s captured again, because %d tensors of this rank have moved: %s",
        "vLLM's graphs and Rose's are" if stale == StaleGraphs.ALL else "Rose's graphs are",
        len(moved),
        names,
    )
    # As at start-up.
    with torch.inference_mode(False), set_current_vllm_config(runner.vllm_config):
        if stale == StaleGraphs.ROSES:
            _drop_steps(manager)
            return _capture_steps(runner, steps.stream)
        # vLLM's own layers look their weights up when they are captured. By itself vLLM captures nothing again.
        for model in (runner.model, getattr(runner.speculator, "model", None)):
            if (take_moved_weights := getattr(model, "take_moved_weights", None)) is not None:
                take_moved_weights()
        CUDAGraphWrapper.clear_all_graphs()
        for each in managers_of(runner):
            each.release_graphs()
        runner.capture_model()
    return getattr(manager, "rose_step_graphs", None)


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner.execute_model``; see the patch ledger."""

    @functools.wraps(original)
    def execute_model(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        steps = _steps_of(self)
        if steps is None or intermediate_tensors is not None or args or kwargs:
            return original(self, scheduler_output, intermediate_tensors, *args, **kwargs)
        if steps.launch(scheduler_output):
            return None
        with steps.votes.handed_on():
            return original(self, scheduler_output, intermediate_tensors)

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
    shape = (
        min(most, max_num_logits(runner, runner.decode_query_len)),
        runner.model_config.get_hidden_size(),
    )
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
