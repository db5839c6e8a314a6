"""Rose's sampler in model runner V2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from rose_backend.vllm_plugin.sampler.draw_graphs import DrawGraphs, captures_draws
from rose_backend.vllm_plugin.sampler.sampler_v1 import (
    PROCESSED_PREFIX,
    draw,
    filter_for_logprobs,
    is_sampler_chosen,
    is_watermarked,
    why_vllm_draws,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def wrap_sampler_v2_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``Sampler.__init__`` of model runner V2; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_sampler_chosen(vllm_config):
            return
        self._sample_random = RoseDraws(self, vllm_config)
        if vllm_config.speculative_config is not None:
            self.apply_sampling_params = functools.partial(_count_drafts, self, self.apply_sampling_params)
        elif not (kwargs.get("custom_logits_processors") or is_watermarked(vllm_config)):
            if why_vllm_draws(vllm_config) is None and captures_draws(vllm_config):
                graphs = DrawGraphs(self.sampling_states)
                graphs.capture()
                self.sample = ReplayedSampling(self, graphs)
            copy_parameters_when_they_change(self)

    return __init__


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
        graphs: of its ``sampling_states``.

    Attributes:
        graphs: as given.
        is_changed: by request slot, whether a processor changes its logits.
    """

    def __init__(self, sampler: Any, graphs: DrawGraphs) -> None:
        self._sample_as_vllm = sampler.sample
        self.graphs = graphs
        self._temperatures = sampler.sampling_states.temperature.np
        # Whether a processor changes a slot's logits (penalties, biases, bad words, thinking budgets).
        self.is_changed = np.zeros(len(self._temperatures), bool)
        for processor in (*sampler.logits_processors, sampler.thinking_budget_state):
            processor.add_request = functools.partial(self._add_to_processor, processor.add_request)
        sampler.add_request = functools.partial(self._add_request, sampler.add_request)
        sampler.apply_staged_writes = functools.partial(self._apply_writes, sampler.apply_staged_writes)

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
        if (
            return_logprobs
            or not self.graphs.serves(logits)
            or self.is_changed[idx_mapping_np].any()
            or not self._temperatures[idx_mapping_np].any()
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
        return self.graphs.draw(logits, expanded_idx_mapping, pos), logits

    def _add_request(self, add_request: Callable[..., None], req_idx: int, sampling_params: Any) -> None:
        self.is_changed[req_idx] = False
        add_request(req_idx, sampling_params)

    def _add_to_processor(self, add_request: Callable[..., bool], req_idx: int, sampling_params: Any) -> bool:
        is_changed = add_request(req_idx, sampling_params)
        self.is_changed[req_idx] |= bool(is_changed)
        return is_changed

    def _apply_writes(self, apply_staged_writes: Callable[[], None]) -> None:
        apply_staged_writes()
        self.graphs.take_parameters()
