"""Rose's sampler in the place of vLLM's top-k/top-p sampler, in both model runners.

vLLM keeps penalties, logit processors, temperature, min-p and log-probabilities; Rose filters and draws. A draw depends
on the request's seed and its own count of draws only, so a seeded request gets the same tokens in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rose_backend.vllm_plugin.options import is_rose_selected, rose_options

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_PROCESSED_PREFIX = "processed"
_SEED_MASK = (1 << 63) - 1
# Odd multiplier that spreads consecutive step numbers over all bits of a seed.
_STEP_MULTIPLIER = 0x9E3779B97F4A7C15
# What one draw advances a CUDA generator's offset by; vLLM takes a draw back by this number.
_OFFSET_PER_DRAW = 4


def serves_sampler(vllm_config: VllmConfig | None) -> bool:
    """Whether Rose draws the tokens of this engine.

    Processed log-probability modes and the check of drafted tokens want the filtered distribution itself, which Rose
    never builds: vLLM's sampler stays, and the line at start-up says so.
    """
    if (
        vllm_config is None
        or not is_rose_selected(vllm_config)
        or not rose_options(vllm_config).fused_sampler
        or vllm_config.speculative_config is not None
    ):
        return False
    model_config = vllm_config.model_config
    return model_config is None or not str(model_config.logprobs_mode).startswith(_PROCESSED_PREFIX)


def wrap_sampler_v1_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``TopKTopPSampler.__init__`` of model runner V1; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.config import get_current_vllm_config_or_none

        if serves_sampler(get_current_vllm_config_or_none()):
            self.forward = RoseTopKTopP()

    return __init__


def wrap_sampler_v2_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``Sampler.__init__`` of model runner V2; see the patch ledger."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if serves_sampler(vllm_config) and not getattr(self, "return_sampling_mask", False):
            self._sample_random = functools.partial(sample_random, self)
            has_other_state = kwargs.get("custom_logits_processors") or getattr(
                vllm_config, "watermark_config", None
            )
            if not has_other_state:
                copy_parameters_when_they_change(self)

    return __init__


def copy_parameters_when_they_change(sampler: Any) -> None:
    """Have model runner V2 copy sampling parameters to the device in steps with new requests only.

    vLLM copies all of them, some twenty small arrays, in every step. Nothing writes them but ``add_request``.
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


class RequestDraws:
    """A seeded request's place in its stream of draws, for CPU generators, which have no offset of their own.

    In vLLM's table of generators it answers to the two methods with which vLLM takes back the draw of an unfinished
    prefill chunk. (With a CPU ``torch.Generator`` there, vLLM's own sampler fails on a seeded, chunked prompt.)
    """

    __slots__ = ("_offset", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._offset = 0

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
    """``TopKTopPSampler.forward`` of one engine."""

    def __init__(self) -> None:
        self._num_steps = 0
        # vLLM puts a request's generator back when the request returns to the batch; its draws go on where they were.
        self._draws: WeakKeyDictionary[torch.Generator, RequestDraws] = WeakKeyDictionary()

    def __call__(
        self,
        logits: torch.Tensor,  # [R, V] float32, temperature and min-p applied
        generators: dict[int, Any],
        k: torch.Tensor | None,  # [R]
        p: torch.Tensor | None,  # [R]
    ) -> tuple[torch.Tensor, None]:
        """Return one token per row, int64 [R], and no processed logits."""
        import torch

        num_rows = logits.shape[0]
        seeds = torch.full((num_rows,), self._step_seed(), dtype=torch.int64)
        positions = torch.arange(num_rows)
        for row in list(generators):
            draws = self._draws_of(generators, row)
            offset = draws.get_offset()
            seeds[row], positions[row] = draws.initial_seed() & _SEED_MASK, offset // _OFFSET_PER_DRAW
            draws.set_offset(offset + _OFFSET_PER_DRAW)
        temperature = torch.ones(num_rows, device=logits.device)
        return draw(logits, temperature, k, p, seeds.to(logits.device), positions.to(logits.device)), None

    def _step_seed(self) -> int:
        import torch

        # Rows without a seed: the engine's seed and the step make the key, the row the position.
        self._num_steps += 1
        return (torch.initial_seed() + self._num_steps * _STEP_MULTIPLIER) & _SEED_MASK

    def _draws_of(self, generators: dict[int, Any], row: int) -> Any:
        generator = generators[row]
        if isinstance(generator, RequestDraws) or generator.device.type == "cuda":
            return generator
        draws = self._draws.get(generator)
        if draws is None:
            draws = self._draws[generator] = RequestDraws(generator.initial_seed())
        generators[row] = draws
        return draws


def sample_random(
    sampler: Any,
    processed_logits: torch.Tensor,  # [R, V], temperature and min-p applied
    expanded_idx_mapping: torch.Tensor,  # [R] int32, row -> request slot
    idx_mapping_np: Any,
    pos: torch.Tensor,  # [R] int64
    top_k: torch.Tensor | None,  # [R]
    top_p: torch.Tensor | None,  # [R]
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for ``Sampler._sample_random`` of model runner V2: greedy, seeded and filtered rows in one call."""
    states = sampler.sampling_states
    if not states.temperature.np[idx_mapping_np].any():
        # Nobody draws. Small batches wait for the host, and gathering what a draw takes is most of its work here.
        return processed_logits.argmax(dim=-1), processed_logits
    # Already applied; what is left to say is which rows are greedy.
    temperature = states.temperature.gpu.index_select(0, expanded_idx_mapping).sign()
    seeds = states.seeds.gpu.index_select(0, expanded_idx_mapping)
    return draw(processed_logits.float(), temperature, top_k, top_p, seeds, pos), processed_logits


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


@functools.lru_cache(maxsize=16)
def _neutral_values(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [R] values of options that nobody uses: float32 zeros and ones, and int32 zeros. They are only read."""
    import torch

    zeros = torch.zeros(num_rows, device=device)
    return zeros, torch.ones(num_rows, device=device), zeros.to(torch.int32)
