"""Stand-ins for vLLM's sampler of model runner V2: request states by slot, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import states
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rose_backend.vllm_plugin.sampler import RoseDraws

VOCAB, SLOTS = 512, 24


class FakeV2Sampler:
    """What Rose uses of vLLM's sampler: the state of requests by slot, and a draw of its own that always takes 0."""

    def __init__(
        self,
        temperatures: list[float],
        seeds: list[int],
        *,
        has_seed: tuple[bool, ...] = (),
        logprobs: tuple[bool, ...] = (),
        watermarks: tuple[bool, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(
                gpu=torch.tensor(temperatures, device=device), np=np.array(temperatures, np.float32)
            ),
            seeds=SimpleNamespace(gpu=torch.tensor(seeds, device=device)),
            any_explicit_seed=lambda slots: bool(np.array(has_seed)[slots].any()),
        )
        self.watermarking = SimpleNamespace(np=np.array(watermarks))
        self.needs_logits_processing = np.zeros(len(temperatures), bool)
        self._logprobs = np.array(logprobs)
        self.num_vllm_draws = 0

    def get_logprobs_dims(self, slots: Any) -> tuple[int, int] | None:
        return (1, 0) if self._logprobs[slots].any() else None

    def _sample_random(
        self, logits: torch.Tensor, mapping: Any, slots: Any, pos: Any, top_k: Any, top_p: Any, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_vllm_draws += 1
        return torch.zeros(len(logits), dtype=torch.int64), logits.fill_(7.0)


def draws_of(sampler: Any, **config: Any) -> RoseDraws:
    model = {"use_fp64_gumbel": False, "return_sampling_mask": False, "logprobs_mode": "raw_logprobs"}
    model |= {name: config.pop(name) for name in list(config) if name in model}
    defaults = {"speculative_config": None, "watermark_config": None, "use_v2_model_runner": True}
    return RoseDraws(
        sampler, SimpleNamespace(model_config=SimpleNamespace(**model), **{**defaults, **config})
    )


class V2Sampler:
    """What of vLLM's class is replaced, and how often parameters were copied."""

    def __init__(self, vllm_config: Any, custom_logits_processors: Any = ()) -> None:
        temperatures = SimpleNamespace(np=np.array([1.0, 0.0, 0.0]))
        self.sampling_states = SimpleNamespace(temperature=temperatures, vocab_size=512)
        self.req_states = SimpleNamespace(device=torch.device("cpu"))
        self.logits_processors: list[Any] = []
        self.thinking_budget_state = SimpleNamespace(add_request=None)
        self.added: list[tuple[int, Any]] = []
        self.copied: list[int] = []

    def _sample_random(self) -> str:
        return "vLLM"

    sample = _sample_random

    def apply_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        self.added.append((req_idx, sampling_params))

    def apply_staged_writes(self) -> None:
        self.copied.append(len(self.added))


class HostTensor:
    """vLLM's tensor of request parameters, where there is no device: a copy per call, as there."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()
        self.copy_to_uva()

    def copy_to_uva(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy())


def apply_temperature(logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor) -> None:
    of_row = temperature[slots.long()]
    logits /= torch.where(of_row == 0, 1.0, of_row)[:, None]


def apply_min_p(logits: torch.Tensor, slots: torch.Tensor, min_p: torch.Tensor) -> None:
    lowest = logits.max(-1, keepdim=True).values + min_p[slots.long()].log()[:, None]
    logits.masked_fill_(logits < lowest, -torch.inf)


class Penalties:
    """A logits processor in the place of vLLM's: requests that repeat less get all their logits but one banned."""

    def __init__(self) -> None:
        self.is_used = np.zeros(SLOTS, bool)

    def add_request(self, req_idx: int, params: SamplingParams) -> bool:
        self.is_used[req_idx] = params.repetition_penalty != 1.0
        return bool(self.is_used[req_idx])

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np):
            if self.is_used[slot]:
                logits[row] = torch.where(torch.arange(VOCAB, device=logits.device) == slot, 0.0, -torch.inf)
        return logits


class BareSampler(Sampler):
    """vLLM's own sampler with the states that this test needs, and Rose's draw."""

    def __init__(self, device: str) -> None:
        self.sampling_states = states.SamplingStates(SLOTS, VOCAB)
        self.logits_processors = [Penalties()]
        silent = SimpleNamespace(
            add_request=lambda *args: False, apply_staged_writes=lambda: None, apply=lambda *args: None
        )
        self.thinking_budget_state = self.logprob_token_ids_state = silent
        self.trace_replay_state = None
        self.needs_logits_processing = np.zeros(SLOTS, bool)
        self.use_flashinfer = self.use_xpu_sampler = False
        self.logprobs_mode = "raw_logprobs"
        self.device = device
        self._sample_random = draws_of(self)

    def step(self, logits: torch.Tensor, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Draw as vLLM's model runner does, for one row of each slot."""
        self.apply_staged_writes()
        mapping = torch.tensor(slots, dtype=torch.int32, device=self.device)
        pos = torch.tensor(positions, device=self.device)
        bounds = np.zeros(len(slots), np.int32)
        tokens, _ = self.sample(logits, mapping, mapping, np.array(slots, np.int32), pos, pos, pos, bounds)
        return tokens
