"""Rose's sampler in place of vLLM's top-k/top-p sampler: for model runner V1, and what both runners share.

vLLM keeps penalties, logit processors, temperature, min-p and log-probabilities; Rose applies top-k and top-p and
draws. A draw depends only on the request's seed and its number of draws, so a seeded request gets the same tokens in
any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rose_backend.vllm_plugin.options import is_rose_selected, rose_options
from rose_backend.vllm_plugin.plugin_logger import SAMPLES

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

PROCESSED_PREFIX = "processed"
"""Prefix of vLLM's ``logprobs_mode`` values that report the filtered distribution."""

_SEED_MASK = (1 << 63) - 1
# Odd multiplier that spreads consecutive step numbers over all bits of a seed.
_STEP_MULTIPLIER = 0x9E3779B97F4A7C15
# One draw advances a CUDA generator's offset by this; vLLM undoes a draw by subtracting it.
_OFFSET_PER_DRAW = 4


def is_sampler_chosen(vllm_config: VllmConfig | None) -> bool:
    """Whether Rose's sampler is switched on; it may leave some or all draws to vLLM's."""
    return (
        vllm_config is not None and is_rose_selected(vllm_config) and rose_options(vllm_config).fused_sampler
    )


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


def wrap_sampler_v1_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``TopKTopPSampler.__init__`` of model runner V1; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None or not is_sampler_chosen(vllm_config):
            return
        reason = why_vllm_draws(vllm_config)
        if reason is None:
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
        import torch

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
        draws = self._draws.get(generator)
        if draws is None:
            draws = self._draws[generator] = RequestDraws(generator.initial_seed())
        generators[row] = draws
        return draws


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
    import torch

    from rose_backend.kernels import SamplingTensors, sample

    num_rows = len(temperature)
    zeros, ones, no_top_k = (
        tensor[:num_rows] for tensor in _neutral_values(1 << (num_rows - 1).bit_length(), temperature.device)
    )
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


@functools.cache
def _neutral_values(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [R] values of unused options: float32 zeros and ones, and int32 zeros. They are only read.

    They are cached, one set for each power of two, as CUDA graphs hold their addresses.

    Raises:
        RuntimeError: asked for first while a graph is being captured.
    """
    import torch

    from rose_backend.kernels.captured_graphs import refuse_first_use_in_capture

    refuse_first_use_in_capture("draw", device)
    zeros = torch.zeros(num_rows, device=device)
    return zeros, torch.ones(num_rows, device=device), zeros.to(torch.int32)
