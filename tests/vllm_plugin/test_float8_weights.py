"""Which float8 weights of vLLM's modules Rose's kernel reads, by how vLLM's methods have left them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_backend.kernels import small_batch_linear
from rose_backend.vllm_plugin.models.float8_weights import LoadedFloat8

ROWS, DEPTH = 256, 192
BLOCKS, CHANNELS = "CutlassFp8BlockScaledMMKernel", "CutlassFP8ScaledMMLinearKernel"


def made(name: str, **attributes: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**attributes)


def module_of(
    values: torch.Tensor, scales: torch.Tensor, kernel: str, method: str = "Fp8LinearMethod"
) -> Any:
    """Return a module of ``ROWS`` outputs whose method has such a kernel."""
    owner = made("owner", fp8_linear=made(kernel))
    return SimpleNamespace(
        weight=SimpleNamespace(data=values),
        weight_scale=SimpleNamespace(data=scales),
        bias=None,
        output_size_per_partition=ROWS,
        input_size_per_partition=DEPTH,
        scheme=owner,
        quant_method=made(method, fp8_linear=owner.fp8_linear),
    )


def values_of(num_rows: int = ROWS, depth: int = DEPTH) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, num_rows * depth).view(num_rows, depth).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scales", "kernel", "method"),
    [
        (torch.rand(2, 2), BLOCKS, "Fp8LinearMethod"),
        (torch.rand(2, 2).t(), BLOCKS, "Fp8PerBlockOnlineLinearMethod"),
        (torch.rand(ROWS, 1), CHANNELS, "CompressedTensorsLinearMethod"),
        (torch.rand(ROWS), CHANNELS, "ModelOptLinearMethod"),
        (torch.tensor(0.5), CHANNELS, "Fp8LinearMethod"),
        (torch.tensor([0.5]), CHANNELS, "Fp8PerTensorOnlineLinearMethod"),
    ],
)
def test_vllms_memory_is_read(scales: torch.Tensor, kernel: str, method: str) -> None:
    values = values_of()
    module = module_of(values if kernel == BLOCKS else values.t(), scales, kernel, method)
    loaded = LoadedFloat8(module, packs=True, gated=False)
    linear = loaded.read()
    assert linear.packed is not None and linear.packed.weight is linear.weight and loaded.unread is None
    assert linear.weight.values.data_ptr() == values.data_ptr()  # type: ignore[union-attr]
    assert linear.weight.scales.data_ptr() == scales.data_ptr()  # type: ignore[union-attr]
    x = torch.randn(3, DEPTH)
    wide = scales.reshape(-1, 1).clone()
    if kernel == BLOCKS:
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :DEPTH]
    assert torch.allclose(small_batch_linear(x, linear.packed), x @ (values.float() * wide).t(), atol=1e-4)
    # Numbers that are loaded later are read, too.
    scales.mul_(2)
    assert torch.allclose(
        small_batch_linear(x, linear.packed), x @ (values.float() * wide).t() * 2, atol=1e-4
    )


@pytest.mark.parametrize(
    ("module", "gated", "reason"),
    [
        (
            module_of(values_of(), torch.rand(2, 2), BLOCKS, "QuarkLinearMethod"),
            False,
            f"QuarkLinearMethod with {BLOCKS}",
        ),
        (
            module_of(values_of(), torch.rand(2, 2), "MarlinFP8ScaledMMLinearKernel"),
            False,
            "Fp8LinearMethod with MarlinFP8ScaledMMLinearKernel",
        ),
        # As CUTLASS pads.
        (
            module_of(values_of(ROWS + 16).t(), torch.rand(ROWS + 16, 1), CHANNELS),
            False,
            "values [272, 192] with scales [272, 1]",
        ),
        (
            module_of(values_of().t().contiguous(), torch.rand(ROWS, 1), CHANNELS),
            False,
            "expected a contiguous tensor",
        ),
        # As DeepGEMM packs them on newer GPUs.
        (
            module_of(values_of(), torch.zeros(2, 1, dtype=torch.int32), BLOCKS),
            False,
            "scales: expected dtype torch.float32",
        ),
        (
            module_of(values_of(), torch.rand(ROWS, 1), BLOCKS),
            False,
            "values [256, 192] with scales [256, 1]",
        ),
        (
            module_of(values_of().t(), torch.rand(2, 2), CHANNELS),
            False,
            "values [256, 192] with scales [2, 2]",
        ),
        (module_of(values_of().view(torch.uint8), torch.rand(2, 2), BLOCKS), False, "values: expected dtype"),
    ],
)
def test_other_memory_is_left_to_vllm(module: Any, gated: bool, reason: str) -> None:
    loaded = LoadedFloat8(module, packs=True, gated=gated)
    linear = loaded.read()
    assert linear.packed is None and linear.many_rows is not None and loaded.has_nan is None
    assert reason in str(loaded.unread)
    # Nobody asks what is in a weight that is not packed.
    assert LoadedFloat8(module, packs=False, gated=gated).read().packed is None


def test_blocks_with_rows_of_gate_and_factor() -> None:
    module = module_of(values_of(384), torch.rand(3, 2), BLOCKS)
    module.output_size_per_partition = 384
    loaded = LoadedFloat8(module, packs=True, gated=True)
    assert loaded.read().packed is None and "whole blocks of 128 rows of a gate" in str(loaded.unread)
    module.weight_scale.data = torch.rand(3, 2)
    assert LoadedFloat8(module, packs=True, gated=False).read().packed is not None


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x7E, 0x00])
def test_codes_that_are_no_numbers_are_found(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the last of several parts.
    monkeypatch.setattr("rose_backend.vllm_plugin.models.float8_weights._CHECKED_BYTES", 1000)
    values = values_of()
    values.view(torch.uint8)[-1, -1] = code
    loaded = LoadedFloat8(module_of(values, torch.rand(2, 2), BLOCKS), packs=True, gated=False)
    loaded.read()
    assert loaded.has_nan is not None and bool(loaded.has_nan) is (code & 0x7F == 0x7F)
