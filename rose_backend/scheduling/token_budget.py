"""Token counts that depend on the device: the budget of a step, and the prefix that a prompt waits for."""

from __future__ import annotations

import torch

from rose_backend.scheduling.in_flight_prefixes import MIN_TOKENS_WORTH_WAITING

_CPU = 2048
"""A CPU is no faster with more, and a step delays running sequences."""
_SMALL_GPU = {"offline": 8192, "online": 2048}
_LARGE_GPU = {"offline": 16_384, "online": 8192}
"""vLLM's defaults for such GPUs. On an H200 a pass of GPT-2 124M takes 6.4 ms for 16,384 tokens, 3.1 ms for 8,192 and
1.0 ms for 2,048: larger ones delay running sequences, smaller ones take less than the CPU's 2 ms per step."""
_LARGE_GPU_BYTES = 70 << 30
_WORTH_WAITING_ON_A_GPU = 1024
"""For GPT-2 124M on an H200, where waiting costs a step of about 2 ms. Median ms to the first token, waiting / not: 128
tokens shared by 2 requests 3.7 / 2.1, by 8 5.2 / 2.7, by 32 7.5 / 4.9; 768 tokens 4.6 / 2.2, 5.5 / 5.1, 8.4 / 9.3. To
be measured again for larger models."""


def default_token_budget(device: torch.device, *, is_online: bool) -> int:
    """Return ``max_num_batched_tokens``; ``is_online``: clients read tokens while they are generated."""
    if device.type == "cpu":
        return _CPU
    is_large = torch.cuda.get_device_properties(device).total_memory >= _LARGE_GPU_BYTES
    return (_LARGE_GPU if is_large else _SMALL_GPU)["online" if is_online else "offline"]


def default_token_budgets(device: torch.device | None) -> list[int]:
    """Return all that ``default_token_budget`` may return for ``device``; None: for any GPU."""
    if device is not None:
        return sorted({default_token_budget(device, is_online=each) for each in (False, True)})
    return sorted({*_SMALL_GPU.values(), *_LARGE_GPU.values()})


def min_tokens_worth_waiting(device: torch.device) -> int:
    """Return how many tokens of a prompt another one must compute in a step for it to wait for the next step."""
    return _WORTH_WAITING_ON_A_GPU if device.type == "cuda" else MIN_TOKENS_WORTH_WAITING
