"""Block clones of a whole GPT-2 cache: 590 kB per block, all layers, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from rose_backend.kernels.gpu.block_clone import block_clone

NUM_LAYERS, NUM_BLOCKS, BLOCK_SHAPE = 12, 3000, (16, 12, 64)
BLOCK_BYTES = NUM_LAYERS * 2 * 16 * 12 * 64 * 2
TORCH = "torch index_select, index_copy_"
VLLM = "vLLM copy_kv_cache_blocks_inplace"

Pairs = tuple[torch.Tensor, torch.Tensor]


def torch_clone(cache: torch.Tensor, pairs: Pairs) -> Callable[[], object]:
    """Gather and scatter all layers at once."""
    src, dst = pairs[0], pairs[1].long()
    return lambda: cache.index_copy_(2, dst, cache.index_select(2, src))


def vllm_clones(layers: list[torch.Tensor], sets: Sequence[Pairs]) -> Launches | None:
    """vLLM's own copy for partial prefix hits, layer after layer.

    Its transfer of the pairs to the device is left out, as it is on the other sides.
    """
    modules = peers.load(VLLM, "vllm.v1.worker.utils")
    if modules is None:
        return None
    (utils,) = modules

    def launch(pairs: Pairs) -> Callable[[], object]:
        on_device = torch.stack(pairs, 1).long()
        on_host = on_device.tolist()

        def run() -> None:
            with mock.patch.object(utils, "async_tensor_h2d", lambda *_, **__: on_device):
                utils.copy_kv_cache_blocks_inplace(layers, NUM_BLOCKS, on_host)

        return run

    return [launch(pairs) for pairs in sets]


def clone_case(num_pairs: int, *, independent: bool = True) -> KernelCase:
    """Copy random blocks over other random blocks; with ``independent`` off as if they might be chained."""

    def make(num_sets: int) -> Contest:
        cache = torch.randn(NUM_LAYERS, 2, NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.float16, device="cuda")
        # vLLM: a tensor per layer, keys and values of a head side by side.
        layers = [layer.permute(1, 2, 3, 0, 4).flatten(3) for layer in cache]
        sets = [
            tuple(torch.randperm(NUM_BLOCKS, device="cuda")[: 2 * num_pairs].int().chunk(2))
            for _ in range(num_sets)
        ]

        def rose(pairs: Pairs) -> Callable[[], object]:
            return lambda: block_clone(cache, *pairs, block_dim=2, independent=independent)

        sides: dict[str, Launches] = {ROSE: [rose(pairs) for pairs in sets]}
        sides[TORCH] = [torch_clone(cache, pairs) for pairs in sets]
        in_vllm = vllm_clones([layer.transpose(1, 2) for layer in layers], sets)
        if in_vllm is not None:
            sides[VLLM] = in_vllm
        dst = sets[0][1].long()

        def reset() -> None:
            cache[:, :, dst] = float("nan")
            for layer in layers:
                layer[dst] = float("nan")

        def observe(side: str, _: object) -> tuple[torch.Tensor]:
            if side == VLLM:
                copied = torch.stack([layer[dst] for layer in layers])
                return (copied.unflatten(4, (2, -1)).permute(0, 4, 1, 2, 3, 5),)
            return (cache[:, :, dst],)

        return Contest(sides, reset=reset, observe=observe)

    kind = "" if independent else ", maybe chained"
    plural = "" if num_pairs == 1 else "s"
    return KernelCase(
        f"clone {num_pairs} block{plural} of 12 layers{kind}", 2 * num_pairs * BLOCK_BYTES, make
    )


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for num_pairs in (1, 16, 256):
        yield clone_case(num_pairs)
    yield clone_case(256, independent=False)
