"""Numbers of tokens that depend on the device: what a step may compute, and what a prompt waits for."""

from __future__ import annotations

import torch

from rose_backend.block_manager.prefixes_under_way import MIN_TOKENS_WORTH_WAITING

_CPU = 2048
"""A CPU is no faster with more, and a step holds up the texts that are running."""
_SMALL_GPU = {"offline": 8192, "online": 2048}
_LARGE_GPU = {"offline": 16_384, "online": 8192}
"""vLLM's defaults for such GPUs, and they fit: on an H200 a pass of GPT-2 124M takes 6.4 ms for 16,384 tokens, 3.1 ms
for 8,192 and 1.0 ms for 2,048. During a pass no running text gets a token; but each step costs the host about 2 ms
while prompts come in, so that small passes leave the GPU idle."""
_LARGE_GPU_BYTES = 70 << 30
_WORTH_WAITING_ON_A_GPU = 1024
"""A GPU computes tokens of models as small as GPT-2 124M nearly for nothing, and a step more costs it about 2 ms. On an
H200 (``benchmarks.waiting``), median time to the first token of those that share, waiting / not, in ms: 128 tokens
shared by 2 requests 3.7 / 2.1, by 8 5.2 / 2.7, by 32 7.5 / 4.9; 768 tokens 4.6 / 2.2, 5.5 / 5.1, 8.4 / 9.3. To be
measured again for larger models.
"""


def default_token_budget(device: torch.device, *, is_online: bool) -> int:
    """Return ``max_num_batched_tokens`` for a device.

    Args:
        is_online: somebody waits for each token; otherwise only for the end.
    """
    if device.type == "cpu":
        return _CPU
    budgets = (
        _LARGE_GPU
        if torch.cuda.get_device_properties(device).total_memory >= _LARGE_GPU_BYTES
        else _SMALL_GPU
    )
    return budgets["online" if is_online else "offline"]


def min_tokens_worth_waiting(device: torch.device) -> int:
    """Return for how many tokens that another prompt computes in the same step a prompt waits for the next one."""
    return _WORTH_WAITING_ON_A_GPU if device.type == "cuda" else MIN_TOKENS_WORTH_WAITING
