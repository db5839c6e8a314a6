"""Rose's sampler in both of vLLM's model runners: top-k, top-p and the draw in one kernel.

vLLM keeps penalties, logits processors, temperature and min-p; Rose applies top-k and top-p and draws. A draw depends
only on the request's seed and its number of draws, so a seeded request gets the same tokens in any batch.

Draws of model runner V2 are one CUDA graph per number of rows: parameters, temperature, min-p, filters and the draw.
Launched one by one, these dozen operations take the CPU longer than a small model's whole step takes the device. Steps
that are replayed whole draw by the same operations, with vLLM's logits processors before them where a row needs any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.config import VllmConfig

from rose_backend.kernels import SamplingTensors, sample
from rose_backend.kernels.gpu_properties import current_workspace, is_recording
from rose_backend.kernels.sampling.ops import SAMPLER_KERNELS
from rose_backend.vllm_plugin.captured_processors import (
    SAMPLING_PARAMETERS,
    CapturedProcessors,
    RequestParameters,
    launch_reports,
    processor_arrays,
    report_as_graphs,
    sampling_arrays,
)
from rose_backend.vllm_plugin.options import adapts_drafts, is_rose_selected, rose_options, why_no_graphs
from rose_backend.vllm_plugin.pending_kernels import wait_for_kernels
from rose_backend.vllm_plugin.plugin_logger import SAMPLES

PROCESSED_PREFIX = "processed"
"""Prefix of vLLM's ``logprobs_mode`` values that report the filtered distribution."""

_SEED_MASK = (1 << 63) - 1
# Odd multiplier that spreads consecutive step numbers over all bits of a seed.
_STEP_MULTIPLIER = 0x9E3779B97F4A7C15
# One draw advances a CUDA generator's offset by this; vLLM undoes a draw by subtracting it.
_OFFSET_PER_DRAW = 4

MAX_LOGITS_BYTES = 64 << 20
"""Limit on the float32 logits that a graph reads at once: 333 rows of 50,257 tokens, 110 of 151,936. Larger steps that
are replayed whole draw in parts of this size. Other larger steps are launched, because the device is the bottleneck."""

_ALIGNED = 16
"""Parts of a batch start at multiples of this row, so that their pointers are as aligned as the tensor's own."""


def is_sampler_chosen(vllm_config: VllmConfig | None) -> bool:
    """Whether Rose's sampler is switched on; it may leave some or all draws to vLLM's."""
    return is_rose_selected(vllm_config) and rose_options(vllm_config).fused_sampler


def why_vllm_draws(vllm_config: VllmConfig) -> str | None:
    """Return why all draws of an engine with Rose's sampler are vLLM's; None if they are not."""
    model_config = vllm_config.model_config
    if model_config is not None and model_config.use_fp64_gumbel:
        return "float64 noise"
    if model_config is not None and model_config.return_sampling_mask:
        return "sampling masks"
    if vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
        # The rejection sampler draws from the requests' generators, in the same steps.
        return "drafts"
    return None


def is_watermarked(vllm_config: VllmConfig) -> bool:
    """Whether requests of this engine may get watermarks, which vLLM's sampler draws. Model runner V2 only."""
    return getattr(vllm_config, "watermark_config", None) is not None


def filter_for_logprobs(
    logits: torch.Tensor,  # [R, V]
    top_k: torch.Tensor | None,  # [R]
    top_p: torch.Tensor | None,  # [R]
) -> torch.Tensor:
    """Return the filtered logits [R, V] by vLLM's filter, with minus infinity for what it drops.

    Rose's sampler normally never builds them. Where they are reported, it draws from them, so that the report and the
    draw agree about tokens at the threshold. ``logits`` may be written to.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    filtered: torch.Tensor = apply_top_k_top_p(logits, top_k, top_p)
    return filtered


def draw(
    logits: torch.Tensor,  # [R, V] float32
    temperature: torch.Tensor,  # [R] float32
    top_k: torch.Tensor | None,  # [R]
    top_p: torch.Tensor | None,  # [R]
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
) -> torch.Tensor:
    """Filter and draw with ``rose_backend.kernels.sample``; return int64 [R]."""
    num_rows = len(temperature)
    neutral = _neutral_values(1 << (num_rows - 1).bit_length(), temperature.device)
    zeros, ones, no_top_k = (tensor[:num_rows] for tensor in neutral)
    params = SamplingTensors(
        temperature=temperature,
        top_k=no_top_k if top_k is None else top_k.to(torch.int32),
        top_p=ones if top_p is None else top_p.to(torch.float32),
        min_p=zeros,
        seed=seeds,
        position=positions,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=ones,
    )
    return sample(logits, params).token_ids


def _neutral_values(num_rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the workspace's [R] values of unused options: float32 zeros and ones, and int32 zeros. They are only read.

    There is one set for each power of two.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """

    def make() -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros(num_rows, device=device)
        return zeros, torch.ones(num_rows, device=device), zeros.to(torch.int32)

    return current_workspace().tensors("draw", device, num_rows, make)


# Model runner V1


def wrap_sampler_v1_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``TopKTopPSampler.__init__`` of model runner V1; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        if not is_sampler_chosen(vllm_config):
            return
        if (reason := why_vllm_draws(vllm_config)) is None:
            self.forward = RoseTopKTopP(self.logprobs_mode)
        else:
            self.forward = functools.partial(_count_and_draw, reason, self.forward)

    return __init__


def _count_and_draw(reason: str, forward: Callable[..., Any], logits: torch.Tensor, *args: Any) -> Any:
    SAMPLES.count_vllm(reason, logits.shape[0])
    return forward(logits, *args)


@dataclass(slots=True, eq=False)
class RequestDraws:
    """Replaces the CPU generator of a seeded request, which has no offset, by a seed and a number of draws.

    In vLLM's table of generators it has the two methods with which vLLM undoes the draw of an unfinished prefill
    chunk. (With a CPU ``torch.Generator`` there, vLLM's own sampler fails on a seeded, chunked prompt.)
    """

    _seed: int
    _offset: int = 0

    def initial_seed(self) -> int:
        """Return the request's seed."""
        return self._seed

    def get_offset(self) -> int:
        """Return ``_OFFSET_PER_DRAW`` times the number of draws so far."""
        return self._offset

    def set_offset(self, offset: int) -> None:
        """Go to an offset."""
        self._offset = offset


class RoseTopKTopP:
    """``TopKTopPSampler.forward`` of one engine.

    Args:
        logprobs_mode: vLLM's option.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self._logprobs_mode = logprobs_mode
        self._num_steps = 0
        # vLLM restores a request's generator when the request returns to the batch; its draws continue.
        self._draws: WeakKeyDictionary[torch.Generator, RequestDraws] = WeakKeyDictionary()

    def __call__(
        self,
        logits: torch.Tensor,  # [R, V] float32, temperature and min-p applied
        generators: dict[int, Any],
        k: torch.Tensor | None,  # [R]
        p: torch.Tensor | None,  # [R]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return one token per row, int64 [R], and the filtered distribution [R, V] where log-probabilities are of it.

        ``logits`` may be written to.
        """
        num_rows = logits.shape[0]
        SAMPLES.count_rose(num_rows)
        filtered = None
        if self._logprobs_mode.startswith(PROCESSED_PREFIX):
            logits, k, p = filter_for_logprobs(logits, k, p), None, None
            filtered = logits if self._logprobs_mode == "processed_logits" else logits.log_softmax(dim=-1)
        # Rows without a seed: the engine's seed and the step make the key, the row the position.
        self._num_steps += 1
        step_seed = (torch.initial_seed() + self._num_steps * _STEP_MULTIPLIER) & _SEED_MASK
        seeds = torch.full((num_rows,), step_seed, dtype=torch.int64)
        positions = torch.arange(num_rows)
        for row in list(generators):
            draws = self._draws_of(generators, row)
            offset = draws.get_offset()
            seeds[row], positions[row] = draws.initial_seed() & _SEED_MASK, offset // _OFFSET_PER_DRAW
            draws.set_offset(offset + _OFFSET_PER_DRAW)
        temperature = torch.ones(num_rows, device=logits.device)
        tokens = draw(logits, temperature, k, p, seeds.to(logits.device), positions.to(logits.device))
        return tokens, filtered

    def _draws_of(self, generators: dict[int, Any], row: int) -> Any:
        generator = generators[row]
        if isinstance(generator, RequestDraws) or generator.device.type == "cuda":
            return generator
        if generator not in self._draws:
            self._draws[generator] = RequestDraws(generator.initial_seed())
        generators[row] = self._draws[generator]
        return generators[row]


# Model runner V2


def wrap_sampler_v2_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``Sampler.__init__`` of model runner V2; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_sampler_chosen(vllm_config):
            return
        self._sample_random = RoseDraws(self, vllm_config)
        has_drafts = vllm_config.speculative_config is not None
        if has_drafts:
            self.apply_sampling_params = functools.partial(_count_drafts, self, self.apply_sampling_params)
        if (not has_drafts or adapts_drafts(vllm_config)) and not (
            kwargs.get("custom_logits_processors") or is_watermarked(vllm_config)
        ):
            if why_vllm_draws(vllm_config) is None and captures_draws(vllm_config):
                make_graphs = functools.partial(_capture_draws, self)
                self.sample = ReplayedSampling(self, make_graphs, has_drafts=has_drafts)
            copy_parameters_when_they_change(self)

    return __init__


def _capture_draws(sampler: Any) -> DrawGraphs:
    # vLLM profiles in inference mode; tensors made there could be written to in inference mode alone.
    with torch.inference_mode(False):
        arrays = sampling_arrays(sampler.sampling_states) | processor_arrays(sampler)
        graphs = DrawGraphs(
            RequestParameters(arrays, sampler.req_states.device), sampler.sampling_states.vocab_size
        )
        graphs.capture()
    return graphs


def _count_drafts(
    sampler: Any,
    apply_sampling_params: Callable[..., Any],
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    idx_mapping: torch.Tensor,
    idx_mapping_np: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace ``Sampler.apply_sampling_params``, which only the rejection sampler calls with top-k and top-p."""
    if not kwargs.get("skip_top_k_top_p") and sampler.sampling_states.temperature.np[idx_mapping_np].any():
        SAMPLES.count_vllm("drafts", len(idx_mapping_np))
    return apply_sampling_params(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *args, **kwargs)


def copy_parameters_when_they_change(sampler: Any) -> None:
    """Make model runner V2 copy sampling parameters to the device in steps with new requests only.

    vLLM copies about twenty small arrays in every step. Only ``add_request`` changes them.
    """
    add_request, apply_staged_writes = sampler.add_request, sampler.apply_staged_writes
    has_new = True

    def noting_add_request(*args: Any) -> None:
        nonlocal has_new
        has_new = True
        add_request(*args)

    def apply_new_writes() -> None:
        nonlocal has_new
        if has_new:
            apply_staged_writes()
            has_new = False

    sampler.add_request, sampler.apply_staged_writes = noting_add_request, apply_new_writes


class RoseDraws:
    """``Sampler._sample_random`` of one sampler of model runner V2: greedy, seeded and filtered rows in one call.

    Steps with a request that needs what Rose does not support are vLLM's, and counted with the reason.

    Args:
        sampler: vLLM's, with its own ``_sample_random``.
        vllm_config: of the engine.
    """

    def __init__(self, sampler: Any, vllm_config: VllmConfig) -> None:
        self._sampler = sampler
        self._draw_as_vllm = sampler._sample_random
        self._reason_for_all = why_vllm_draws(vllm_config)
        self._has_drafts = vllm_config.speculative_config is not None
        self._is_watermarked = is_watermarked(vllm_config)
        model_config = vllm_config.model_config
        mode = "" if model_config is None else str(model_config.logprobs_mode)
        self._may_report_filtered = mode.startswith(PROCESSED_PREFIX)

    def __call__(
        self,
        processed_logits: torch.Tensor,  # [R, V], temperature and min-p applied
        expanded_idx_mapping: torch.Tensor,  # [R] int32, row -> request slot
        idx_mapping_np: Any,  # [R] the same, as an array
        pos: torch.Tensor,  # [R] int64
        top_k: torch.Tensor | None,  # [R]
        top_p: torch.Tensor | None,  # [R]
        *args: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one token per row, int64 [R], and the logits [R, V] that processed log-probabilities are of."""
        states = self._sampler.sampling_states
        temperatures = states.temperature.np[idx_mapping_np]
        if not temperatures.any():
            # All rows are greedy. Small batches wait for the CPU, and gathering parameters is most of its work here.
            candidates = processed_logits
            if self._sampler.needs_logits_processing[idx_mapping_np].any():
                # A repetition penalty that is 0 in float32 makes a masked token's logit NaN, which argmax selects.
                candidates = processed_logits.masked_fill(processed_logits.isnan(), float("-inf"))
            return candidates.argmax(dim=-1), processed_logits
        reason = self._why_vllm_draws(idx_mapping_np, temperatures)
        if reason is not None:
            SAMPLES.count_vllm(reason, len(idx_mapping_np))
            tokens, logits = self._draw_as_vllm(
                processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, *args
            )
            return tokens, logits
        SAMPLES.count_rose(len(idx_mapping_np))
        if self._may_report_filtered and self._sampler.get_logprobs_dims(idx_mapping_np) is not None:
            processed_logits, top_k, top_p = filter_for_logprobs(processed_logits, top_k, top_p), None, None
        # Temperature is already applied; its sign tells which rows are greedy.
        temperature = states.temperature.gpu.index_select(0, expanded_idx_mapping).sign()
        seeds = states.seeds.gpu.index_select(0, expanded_idx_mapping)
        return draw(processed_logits.float(), temperature, top_k, top_p, seeds, pos), processed_logits

    def _why_vllm_draws(self, idx_mapping_np: Any, temperatures: Any) -> str | None:
        if self._reason_for_all is not None:
            return self._reason_for_all
        if self._has_drafts and self._sampler.sampling_states.any_explicit_seed(idx_mapping_np):
            # In steps with drafts vLLM draws from the seed. Whether a step has any depends on the other requests.
            return "seeds beside drafts"
        if (
            self._is_watermarked
            and (self._sampler.watermarking.np[idx_mapping_np] & (temperatures != 0)).any()
        ):
            return "watermarks"
        return None


class ReplayedSampling:
    """``Sampler.sample`` of one sampler: steps without logits processing or logprobs are replayed as CUDA graphs.

    All other steps take vLLM's code with ``RoseDraws``; a request gets the same tokens from both.

    Args:
        sampler: vLLM's; its ``add_request`` and those of its processors are wrapped.
        make_graphs: returns graphs with the parameters of its requests.
        has_drafts: of an engine whose steps may have drafts, draws with a seed are vLLM's; see ``RoseDraws``.

    Attributes:
        is_changed: by request slot, whether a processor changes its logits (penalties, biases, bad words, thinking
            budgets).
    """

    def __init__(
        self, sampler: Any, make_graphs: Callable[[], DrawGraphs], *, has_drafts: bool = False
    ) -> None:
        self._sample_as_vllm = sampler.sample
        self._sampler = sampler
        self._make_graphs, self._has_drafts = make_graphs, has_drafts
        self._temperatures = sampler.sampling_states.temperature.np
        self.is_changed = np.zeros(len(self._temperatures), bool)
        for processor in (*sampler.logits_processors, sampler.thinking_budget_state):
            processor.add_request = functools.partial(self._add_to_processor, processor.add_request)
        sampler.add_request = functools.partial(self._add_request, sampler.add_request)
        sampler.apply_staged_writes = functools.partial(self._apply_writes, sampler.apply_staged_writes)

    @functools.cached_property
    def graphs(self) -> DrawGraphs:
        """Made at their first use, in vLLM's profiling run.

        What is allocated while a model loads is thrown away in a deep sleep, and what a graph captured there has left
        is given back as soon as the model is loaded.
        """
        return self._make_graphs()

    def __call__(
        self,
        logits: torch.Tensor,  # [R, V]
        expanded_idx_mapping: torch.Tensor,  # [R] int32, row -> request slot
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,  # the same, as an array
        pos: torch.Tensor,  # [R] int64
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one token per row, int64 [R], and the logits [R, V] that processed log-probabilities are of."""
        graphs = self.graphs
        if (
            return_logprobs
            or not graphs.serves(logits)
            or self.is_changed[idx_mapping_np].any()
            or not self._temperatures[idx_mapping_np].any()
            or (self._has_drafts and self._sampler.sampling_states.any_explicit_seed(idx_mapping_np))
        ):
            return self._sample_as_vllm(
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                input_ids,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                return_logprobs,
            )
        SAMPLES.count_rose(len(idx_mapping_np))
        return graphs.draw(logits, expanded_idx_mapping, pos), logits

    def _add_request(self, add_request: Callable[..., None], req_idx: int, sampling_params: Any) -> None:
        self.is_changed[req_idx] = False
        add_request(req_idx, sampling_params)

    def _add_to_processor(self, add_request: Callable[..., bool], req_idx: int, sampling_params: Any) -> bool:
        is_changed = add_request(req_idx, sampling_params)
        self.is_changed[req_idx] |= bool(is_changed)
        return is_changed

    def _apply_writes(self, apply_staged_writes: Callable[[], None]) -> None:
        apply_staged_writes()
        self.graphs.parameters.take()

    def whole_steps(self, max_num_rows: int) -> CapturedProcessors:
        """Return the logits processors of steps that are replayed whole, and let vLLM's steps report as these do."""
        report_as_graphs(self._sampler)
        return CapturedProcessors(self._sampler, self.graphs.parameters, max_num_rows)


def captures_draws(vllm_config: VllmConfig) -> bool:
    """Whether this engine's draws are replayed from CUDA graphs."""
    return (
        why_no_graphs(vllm_config) is None
        and vllm_config.model_config is not None
        and rose_options(vllm_config).cuda_graph
    )


def draw_graph_sizes(max_num_reqs: int, vocab_size: int) -> tuple[int, ...]:
    """Return the numbers of rows that graphs are captured for, rising; none if even one row has too many logits."""
    limit = min(max_num_reqs, MAX_LOGITS_BYTES // (4 * vocab_size))
    if limit == 0:
        return ()
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, limit, 32)]
    return (*(size for size in sizes if size < limit), limit)


class DrawGraphs:
    """One token per row, drawn as ``Sampler.sample`` of model runner V2 and ``draw`` would, by one graph.

    Only for rows whose logits are changed by temperature and min-p alone. Padding rows are greedy.

    Args:
        parameters: at least those of ``sampling_arrays``.
        vocab_size: of the model.

    Attributes:
        parameters: as given.
        sizes: numbers of rows that there is a graph for, rising.
        max_rows: the largest of them, or 0.
    """

    def __init__(self, parameters: RequestParameters, vocab_size: int) -> None:
        from rose_backend.kernels.captured_graphs import CapturedGraphs

        self.parameters = parameters
        padding_slot, device = parameters.padding_slot, parameters["temperature"].device
        self.sizes = draw_graph_sizes(padding_slot, vocab_size)
        num_rows = self.max_rows = max(self.sizes, default=0)
        self._logits = torch.zeros(num_rows, vocab_size, device=device)
        self._slots = torch.full((num_rows,), padding_slot, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_rows = 0
        # Threads of other parts of vLLM may wait for the device during a capture.
        self._graphs = CapturedGraphs[int](self._compute, capture_error_mode="thread_local")

    def capture(self) -> None:
        """Capture a graph of each size."""
        if not is_recording():
            wait_for_kernels(*SAMPLER_KERNELS)
        self._graphs.capture(reversed(self.sizes))

    def serves(self, logits: torch.Tensor) -> bool:
        """Whether there is a graph for this number of rows."""
        return logits.shape[1] == self._logits.shape[1] and 0 < len(logits) <= self.max_rows

    def draw(
        self,
        logits: torch.Tensor,  # [R, V], stay as they are
        slots: torch.Tensor,  # [R] int32, row -> request slot
        positions: torch.Tensor,  # [R] int64
    ) -> torch.Tensor:
        """Return one token per row, int64 [R], for logits that ``serves`` is true of."""
        num_rows = len(logits)
        self._logits[:num_rows].copy_(logits)
        self._slots[:num_rows].copy_(slots)
        self._positions[:num_rows].copy_(positions)
        if num_rows < self._num_rows:
            self._slots[num_rows : self._num_rows].fill_(self.parameters.padding_slot)
        self._num_rows = num_rows
        self._graphs.run(next(size for size in self.sizes if size >= num_rows))
        # The next step draws into the same memory, while the CPU may still be reading this one's.
        return self._token_ids[:num_rows].clone()

    def compute(
        self,
        logits: torch.Tensor,  # [R, V], stay as they are
        slots: torch.Tensor,  # [R] int32, row -> request slot; the padding slot without a request
        positions: torch.Tensor,  # [R] int64
        token_ids: torch.Tensor,  # [R] int64  written
        process: Callable[[torch.Tensor, slice], None] | None = None,
    ) -> None:
        """Draw one token per row, of any number of rows. For steps that are captured as a whole.

        Args:
            process: changes float32 logits of some rows in place, before temperature; given these rows.
        """
        num_rows = len(logits)
        # Parts of a step begin at aligned addresses, as whole ones do: the same kernels serve both.
        most = num_rows if num_rows <= self.max_rows else max(self.max_rows // _ALIGNED * _ALIGNED, 1)
        for start in range(0, num_rows, most):
            rows = slice(start, min(start + most, num_rows))
            own_logits = self._logits[: rows.stop - start].copy_(logits[rows])
            if process is not None:
                process(own_logits, rows)
            token_ids[rows] = self._drawn(own_logits, slots[rows], positions[rows])

    def _drawn(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
        from vllm.v1.worker.gpu.sample.min_p import apply_min_p

        of = self.parameters
        apply_temperature(logits, slots, of["temperature"])
        apply_min_p(logits, slots, of["min_p"])
        temperature, top_k, top_p, seeds = (
            of[name].index_select(0, slots) for name in ("temperature", "top_k", "top_p", "seeds")
        )
        # Temperature is already applied; only its sign is needed, for greedy rows.
        return draw(logits, temperature.sign(), top_k, top_p, seeds, positions)

    def _compute(self, size: int, _: None = None) -> None:
        self._token_ids[:size] = self._drawn(self._logits[:size], self._slots[:size], self._positions[:size])


def launch_draws(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch what an engine's draws and reports launch, if Rose draws, on tensors without memory."""
    if not is_sampler_chosen(vllm_config) or why_vllm_draws(vllm_config) is not None:
        return
    num_slots, model = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config
    vocab_size, meta = model.get_vocab_size(), torch.device("meta")
    dtypes = {"top_k": np.int32, "seeds": np.int64, "num_logprobs": np.int32}
    arrays = {name: np.zeros(num_slots, dtypes.get(name, np.float32)) for name in SAMPLING_PARAMETERS}
    of_slot = {name: torch.from_numpy(array).to(meta) for name, array in arrays.items()}
    temperature, top_k, top_p, seeds = (of_slot[name] for name in ("temperature", "top_k", "top_p", "seeds"))
    # Launched, rows of logits are those of a tensor, or of a product with a head that ends with rows of padding.
    for width in (vocab_size, -(-vocab_size // 16) * 16):
        logits = torch.empty((num_slots, width), device="meta")[:, :vocab_size]
        draw(logits, temperature, top_k, top_p, seeds, torch.empty_like(seeds))
    has_graphs = vllm_config.speculative_config is None or adapts_drafts(vllm_config)
    if has_graphs and captures_draws(vllm_config):
        DrawGraphs(RequestParameters(arrays, meta), vocab_size).capture()
        launch_reports(num_slots, vocab_size, model.dtype)
