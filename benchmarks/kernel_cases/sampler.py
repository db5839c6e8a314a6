"""The sampler over GPT-2's vocabulary, by filters and batch size; every row of a case asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernel_cases.timing import KernelCase
from rose_backend.kernels import SamplingTensors, sample

VOCAB_SIZE = 50_257
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 500, top-p 0.9": {"top_k": 500, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def make_params(num_rows: int, num_logprobs: int, **filters: float) -> SamplingTensors:
    """Return parameters of rows that differ in seed and position only."""

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return SamplingTensors(
        temperature=column(filters.get("temperature", 0.8)),
        top_k=column(filters.get("top_k", 0), torch.int32),
        top_p=column(filters.get("top_p", 1.0)),
        min_p=column(filters.get("min_p", 0.0)),
        seed=torch.arange(num_rows, device="cuda") * 977,
        position=torch.arange(num_rows, device="cuda"),
        presence_penalty=column(0.0),
        frequency_penalty=column(0.0),
        repetition_penalty=column(1.0),
        num_logprobs=num_logprobs,
    )


def sampler_case(name: str, num_rows: int, num_logprobs: int = -1) -> KernelCase:
    """Sample from logits with a standard deviation of 3."""

    def make_launches(num_sets: int) -> Sequence[Callable[[], object]]:
        params = make_params(num_rows, num_logprobs, **FILTERS[name])

        def launch() -> Callable[[], object]:
            logits = 3 * torch.randn(num_rows, VOCAB_SIZE, device="cuda")
            return lambda: sample(logits, params)

        return [launch() for _ in range(num_sets)]

    title = f"sample B={num_rows} {name}" + (f", {num_logprobs} logprobs" if num_logprobs >= 0 else "")
    return KernelCase(title, num_rows * VOCAB_SIZE * 4, make_launches)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for num_rows in (1, 32, 256):
        for name in FILTERS:
            yield sampler_case(name, num_rows)
        yield sampler_case("top-k 50, top-p 0.9", num_rows, num_logprobs=5)
