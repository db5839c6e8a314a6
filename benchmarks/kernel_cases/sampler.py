"""The sampler over GPT-2's vocabulary by filters and batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kernel_cases import case
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from rose_backend.kernels import SamplingTensors, sample

VOCAB_SIZE = 50_257
TORCH, FLASHINFER = "torch.argmax", "flashinfer"
# At temperature 1, which costs the peer nothing.
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-k 500, top-p 0.9": {"top_k": 500, "top_p": 0.9},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def make_params(num_rows: int, **filters: float) -> SamplingTensors:
    """Return parameters of rows that differ in seed and position only."""

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return SamplingTensors(
        temperature=column(filters.get("temperature", 1.0)),
        top_k=column(filters.get("top_k", 0), torch.int32),
        top_p=column(filters.get("top_p", 1.0)),
        min_p=column(filters.get("min_p", 0.0)),
        seed=torch.arange(num_rows, device="cuda") * 977,
        position=torch.arange(num_rows, device="cuda"),
        presence_penalty=column(0.0),
        frequency_penalty=column(0.0),
        repetition_penalty=column(1.0),
    )


def flashinfer_sample(
    params: SamplingTensors, filters: dict[str, float]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the call that vLLM makes for these filters (for min-p the library's own; vLLM masks in torch)."""
    import flashinfer.sampling as sampling

    fixed = {"deterministic": True, "seed": 977, "offset": 0}
    if "top_k" in filters:
        return lambda logits: sampling.top_k_top_p_sampling_from_logits(
            logits, params.top_k, params.top_p, **fixed
        )
    if "top_p" in filters:
        return lambda logits: sampling.top_p_sampling_from_probs(logits.softmax(-1), params.top_p, **fixed)
    if "min_p" in filters:
        return lambda logits: sampling.min_p_sampling_from_probs(logits.softmax(-1), params.min_p, **fixed)
    return lambda logits: sampling.sampling_from_logits(logits, **fixed)


def allowed_tokens(logits: torch.Tensor, filters: dict[str, float]) -> torch.Tensor:
    """Return which tokens may be drawn, [R, V] bool; the boundary of top-p is drawn a little wide."""
    sorted_logits, order = logits.double().sort(descending=True)
    keep = torch.ones_like(sorted_logits, dtype=torch.bool)
    if filters.get("temperature") == 0.0:
        keep = sorted_logits == sorted_logits[:, :1]
    if "top_k" in filters:
        keep &= sorted_logits >= sorted_logits[:, int(filters["top_k"]) - 1, None]
    probs = sorted_logits.masked_fill(~keep, float("-inf")).softmax(-1)
    keep &= probs.cumsum(-1) - probs <= filters.get("top_p", 1.0) + 1e-4
    keep &= probs >= filters.get("min_p", 0.0) * probs[:, :1] * (1 - 1e-4)
    return torch.zeros_like(keep).scatter(1, order, keep)


def sampler_case(name: str, num_rows: int) -> KernelCase:
    """Sample from logits with a standard deviation of 3."""
    filters = FILTERS[name]

    def make(num_sets: int) -> Contest:
        params = make_params(num_rows, **filters)
        sets = [3 * torch.randn(num_rows, VOCAB_SIZE, device="cuda") for _ in range(num_sets)]

        def bind(function: Callable[[torch.Tensor], Any]) -> Launches:
            return [functools.partial(function, logits) for logits in sets]

        sides = {ROSE: bind(lambda logits: sample(logits, params).token_ids)}
        if name == "greedy":
            sides[TORCH] = bind(lambda logits: logits.argmax(-1))
        else:
            case.add_peer(sides, FLASHINFER, lambda: bind(flashinfer_sample(params, filters)))

        def complaint(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str | None:
            allowed = allowed_tokens(sets[0], filters)
            for side, tokens in ((ROSE, ours[0]), ("the peer", theirs[0])):
                wrong = (~allowed.gather(1, tokens.long()[:, None])).sum().item()
                if wrong:
                    return f"{side} drew {wrong} of {num_rows} tokens that the filters forbid"
            return None

        return Contest(sides, complaint=complaint)

    return KernelCase(f"sample B={num_rows} {name}", num_rows * VOCAB_SIZE * 4, make)


_BATCHES = (1, 8, 32, 128, 256)
CASES = {
    "sampler": [sampler_case(name, num_rows) for name in FILTERS for num_rows in _BATCHES],
}
