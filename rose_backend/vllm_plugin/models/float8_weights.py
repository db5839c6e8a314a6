"""Float8 weights of vLLM's linear modules for Rose's layers: which models qualify, and how their weights are read.

A module keeps vLLM's quantization method, which loads its weight. In steps with few decodes Rose's kernel multiplies by
the weight where vLLM has put it, so it is in memory once; in larger steps vLLM's kernel multiplies. If vLLM's kernel is
one of ``QUANTIZED_KERNELS``, the activations that it would quantize are quantized by the Rose kernel that produces
them, to the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_supported

from rose_backend.config import PluginConfig
from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    Float8Weight,
    InputQuantization,
    PackedLinear,
    QuantizedActivations,
    pack_linear,
)
from rose_backend.kernels.arguments import FLOAT8_CAPABILITY, SCALED_BLOCK
from rose_backend.layers.decoder import max_packed_float8_rows
from rose_backend.layers.linear import Linear
from rose_backend.vllm_plugin.options import first_reason

BLOCKS, ROWS, MATRICES = "blocks", "rows", "matrices"
"""What one scale is for: a block of 128 x 128, an output row, or the whole weight."""
_MODELOPT = {"FP8": MATRICES, "FP8_PER_CHANNEL_PER_TOKEN": ROWS, "FP8_PB_WO": BLOCKS}
BLOCK_KERNELS = (
    *("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel"),
    *("CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"),
    "BlockWiseTorchFP8ScaledMMLinearKernel",
)
"""vLLM's kernels for block scales that leave a weight as [O, E]. Others rearrange it, and Rose cannot read it."""
ROW_KERNELS = (
    *("CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel"),
    *("PerTensorTorchFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
)
"""vLLM's kernels for row or matrix scales that read a weight [O, E] through a view [E, O]. Others, such as Marlin's,
rearrange it."""
QUANTIZED_KERNELS = ("CutlassFP8ScaledMMLinearKernel", "CutlassFp8BlockScaledMMKernel")
"""Kernels whose input is quantized by vLLM's CUDA kernels, which Rose's match bit for bit. DeepGEMM's may belong here,
but have not been run on inputs that Rose has quantized."""
METHODS = (
    *("Fp8LinearMethod", "CompressedTensorsLinearMethod", "ModelOptLinearMethod"),
    *("Fp8PerTensorOnlineLinearMethod", "Fp8PerBlockOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod"),
)
"""vLLM's quantization methods that only multiply, by one of the kernels above."""
_CHECKED_BYTES = 1 << 26
"""Bytes of a weight that are checked for NaN at a time, to bound the memory that the check takes."""


def float8_scales(quant_config: Any) -> str | None:
    """Return what one scale of a model's float8 weights is for; None if they are not float8, or in another scheme.

    Args:
        quant_config: vLLM's ``QuantizationConfig``, or None.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    # Subclasses may differ.
    kind = type(quant_config)
    if kind is Fp8Config:
        return None if quant_config.store_dtype is not None else _of_blocks(quant_config.weight_block_size)
    if kind is ModelOptFp8Config:
        return _MODELOPT.get(quant_config.quant_method)
    if kind is OnlineQuantizationConfig:
        return _online_scales(quant_config)
    return _compressed_scales(quant_config) if kind is CompressedTensorsConfig else None


def _of_blocks(block: Any) -> str | None:
    if block is None:
        return MATRICES
    return BLOCKS if list(block) == [SCALED_BLOCK, SCALED_BLOCK] else None


def _online_scales(quant_config: Any) -> str | None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    spec = quant_config.args.linear
    if spec is None or quant_config.args.targets is not None:
        return None
    scales = {
        quant_utils.kFp8StaticTensorSym: MATRICES,
        quant_utils.kFp8StaticChannelSym: ROWS,
        quant_utils.kFp8Static128BlockSym: BLOCKS,
    }
    return scales.get(spec.weight)


def _compressed_scales(quant_config: Any) -> str | None:
    """Return the scales of a compressed-tensors model, if all its groups have the same."""
    if quant_config.transform_config is not None:
        return None
    found = set()
    for scheme in quant_config.target_scheme_map.values():
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        if not quant_config._is_fp8_w8a8(weights, inputs):
            return None
        strategy = str(getattr(weights.strategy, "value", weights.strategy))
        by_strategy = {"channel": ROWS, "tensor": MATRICES, "block": _of_blocks(weights.block_structure)}
        found.add(by_strategy.get(strategy))
    return found.pop() if len(found) == 1 else None


def expected_quantization(scales: str, depth: int) -> InputQuantization | None:
    """Return how vLLM's kernel will most likely quantize the input of a product; None if Rose's kernels do not.

    ``LoadedFloat8.read`` knows for certain, but only after loading. This guess decides which kernels to compile ahead.

    Args:
        scales: as ``float8_scales`` returns them.
        depth: inputs of the linear layer.
    """
    if scales != BLOCKS:
        return InputQuantization()
    # vLLM prefers DeepGEMM, which quantizes its input itself.
    if depth % SCALED_BLOCK or is_deep_gemm_supported():
        return None
    return InputQuantization(by_group=True)


def why_float8_stays(vllm_config: VllmConfig, options: PluginConfig, scales: str) -> str | None:
    """Return why vLLM's layers run a model with float8 weights; None if Rose's can.

    Args:
        scales: as ``float8_scales`` returns them.
    """
    capability = current_platform.get_device_capability()
    reasons = {
        "float8 weights without a CUDA device": not current_platform.is_cuda(),
        # With block scales, vLLM's kernels rearrange weights before Hopper (Marlin) and scales after it (DeepGEMM).
        "float8 weights on this GPU": capability is not None
        and (capability < FLOAT8_CAPABILITY or (scales == BLOCKS and capability[0] != 9)),
        # No checkpoint is like that, as vLLM refuses it; vLLM's online quantization may produce it.
        "blocks with rows of gate and factor": scales == BLOCKS
        and vllm_config.model_config.hf_text_config.intermediate_size % SCALED_BLOCK != 0,
        # Rose's float8 products do not support one rank's part of a matrix.
        "float8 weights with tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        # max_quantized_rows asks for Rose's kernel all the same.
        "float8 weights for which vLLM's kernel may be faster": options.max_quantized_rows is None
        and max_float8_rows(options, scales, vllm_config.model_config.dtype) == 0,
    }
    return first_reason(reasons)


def max_float8_rows(options: PluginConfig, scales: str, dtype: torch.dtype) -> int:
    """Return how many decodes multiply float8 weights by Rose's kernel.

    Args:
        scales: as ``float8_scales`` returns them.
        dtype: of activations.
    """
    if options.max_quantized_rows is not None:
        return options.max_quantized_rows
    capability = current_platform.get_device_capability()
    # The kernel also splits activations on later GPUs, but was not measured there.
    splits = dtype == torch.bfloat16 and capability is not None and capability[0] == 9
    return max_packed_float8_rows(has_blocks=scales == BLOCKS, splits=splits)


class LoadedFloat8:
    """A linear module with one of vLLM's float8 quantization methods.

    Args:
        packs: prepare it for small batches, if its weight has a layout that Rose's kernel can read.
        gated: whether it is the gate and up projection of a gated MLP.

    Attributes:
        unread: why Rose's kernel cannot read the weight; None if it can, or if ``packs`` is False.
        has_nan: [] bool on the module's device, set by ``read``: whether the weight contains a NaN.
    """

    unread: str | None = None
    has_nan: torch.Tensor | None = None

    def __init__(self, module: Any, *, packs: bool, gated: bool) -> None:
        self._module, self._packs, self._gated = module, packs, gated

    def read(self) -> Linear:
        """Return the layer with the weights that are loaded now. All its tensors are vLLM's."""
        module = self._module
        bias = None if module.bias is None else module.bias.data
        packed = self._pack(bias) if self._packs else None
        weight = module.weight.data if packed is None else packed.weight
        quantization = None
        if type(module.quant_method).__name__ in METHODS:
            quantization = input_quantization(self._kernel, module)
        return Linear(weight, bias, packed, many_rows=self._multiply, quantization=quantization)

    @property
    def _kernel(self) -> Any:
        """vLLM's kernel object, with which the quantization method multiplies; None if the method has none."""
        module, method = self._module, self._module.quant_method
        owner = module.scheme if type(method).__name__ == "CompressedTensorsLinearMethod" else method
        return getattr(owner, "fp8_linear", None) or getattr(owner, "kernel", None)

    def _multiply(self, x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
        module = self._module
        if isinstance(x, QuantizedActivations):
            return _multiplied(self._kernel, module, x)
        product: torch.Tensor = module.quant_method.apply(module, x, module.bias)
        return product

    def _pack(self, bias: torch.Tensor | None) -> PackedLinear | None:
        """Return the packed layer over vLLM's memory; None if Rose's kernel cannot read its layout (see ``unread``)."""
        module = self._module
        names = [type(each).__name__ for each in (module.quant_method, self._kernel)]
        if names[0] not in METHODS or names[1] not in (*BLOCK_KERNELS, *ROW_KERNELS):
            self.unread = " with ".join(names)
            return None
        values = module.weight.data
        scales = _scales_of(module).data
        num_rows, depth = module.output_size_per_partition, module.input_size_per_partition
        if names[1] in ROW_KERNELS:
            values = values.t()
            if scales.numel() in (1, num_rows):
                scales = scales.reshape(-1, 1).expand(num_rows, 1)
        weight = Float8Weight(values, scales)
        try:
            packed = pack_linear(weight, bias, gated=self._gated)
            if weight.shape != (num_rows, depth) or weight.has_blocks is not (names[1] in BLOCK_KERNELS):
                raise ShapeError(f"values {list(values.shape)} with scales {list(scales.shape)}")
        except ShapeError as error:
            self.unread = f"{names[1]}, {error}"
            return None
        self.unread, self.has_nan = None, _has_nan(values)
        return packed


def input_quantization(kernel: Any, module: Any) -> InputQuantization | None:
    """Return how one of vLLM's kernels quantizes a module's input; None if Rose's cannot do it to the same bits."""
    name, by_group = type(kernel).__name__, type(kernel).__name__ in BLOCK_KERNELS
    if name not in QUANTIZED_KERNELS or kernel.config.out_dtype is None:
        return None
    if by_group and module.input_size_per_partition % SCALED_BLOCK:
        return None
    quantize = kernel.quant_fp8
    # vLLM may use compiled torch operations in place of its CUDA kernel; they round differently.
    is_known = type(quantize).__name__ == "QuantFP8" and quantize._forward_method == quantize.forward_cuda
    is_known = is_known and tuple(quantize.group_shape) == (1, SCALED_BLOCK if by_group else -1)
    has_bound = quantize.static or getattr(module, "input_scale_ub", None) is not None
    if not is_known or has_bound or quantize.num_token_padding:
        return None
    if not by_group:
        return InputQuantization()
    powers, aligned = quantize.use_ue8m0, quantize.tma_aligned_scales
    return InputQuantization(by_group=True, powers_of_two=powers, aligned_scales=aligned)


def _multiplied(kernel: Any, module: Any, x: QuantizedActivations) -> torch.Tensor:
    """Return a product of input that is quantized already, as the kernel's ``apply_weights`` would compute it."""
    factors = {"A": x.values, "B": module.weight, "As": x.scales, "Bs": _scales_of(module)}
    product: torch.Tensor
    dtype = kernel.config.out_dtype
    if type(kernel).__name__ in BLOCK_KERNELS:
        product = kernel.apply_block_scaled_mm(**factors)
        return (product if module.bias is None else product + module.bias).to(dtype)
    shape = [len(x.values), module.weight.shape[1]]
    product = kernel.apply_scaled_mm(**factors, out_dtype=dtype, bias=module.bias, output_shape=shape)
    return product


def _scales_of(module: Any) -> Any:
    given = getattr(module, "weight_scale_inv", None)
    return module.weight_scale if given is None else given


def _has_nan(values: torch.Tensor) -> torch.Tensor:
    """Return whether an e4m3 weight contains a NaN, [] bool on its device: Rose's kernel would read it as 480."""
    bits = values.view(torch.uint8)
    parts = bits.split(max(_CHECKED_BYTES // bits.shape[1], 1))
    return torch.stack([(part & 0x7F).amax() for part in parts]).amax() == 0x7F
