"""Float8 weights of vLLM's linear modules, as vLLM's quantization method leaves them, for Rose's layers.

A module keeps vLLM's method, which loads and multiplies. Rose's kernel for few decodes reads the memory that the method
ends with, so both multiply by the same numbers, and each is in memory once. Where it is known how vLLM's kernel
quantizes activations, the kernel before a product of more rows does so as well, to the same bits, and vLLM's only
multiplies.
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
"""vLLM's kernels for scales of blocks that leave a weight [O, E]. Others rearrange it."""
ROW_KERNELS = (
    *("CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel"),
    *("PerTensorTorchFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
)
"""Those for scales of rows or of the matrix that take a view [E, O] of a weight. Others, as Marlin's, rearrange it."""
QUANTIZED_KERNELS = ("CutlassFP8ScaledMMLinearKernel", "CutlassFp8BlockScaledMMKernel")
"""Those that multiply what vLLM's CUDA kernels make of their input, and nothing else. DeepGEMM's would, too, but have
not been run on what Rose's kernels make of it."""
METHODS = (
    *("Fp8LinearMethod", "CompressedTensorsLinearMethod", "ModelOptLinearMethod"),
    *("Fp8PerTensorOnlineLinearMethod", "Fp8PerBlockOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod"),
)
"""vLLM's methods that are nothing but a product with such a kernel."""
_CHECKED_BYTES = 1 << 26
"""Of a weight, that are looked through at once."""


def float8_scales(quant_config: Any) -> str | None:
    """Return what one scale of a model's float8 weights is for; None if its weights are quantized otherwise.

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
    """Return how vLLM's kernel most likely quantizes the input of a weight with such scales; None as by ``read``."""
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
        # With scales of blocks Marlin rearranges weights on GPUs before Hopper, DeepGEMM packs scales on later ones.
        "float8 weights on this GPU": capability is not None
        and (capability < FLOAT8_CAPABILITY or (scales == BLOCKS and capability[0] != 9)),
        # vLLM has such checkpoints refused, but quantizes others so.
        "blocks with rows of gate and factor": scales == BLOCKS
        and vllm_config.model_config.hf_text_config.intermediate_size % SCALED_BLOCK != 0,
        # Rose's kernels do not multiply parts of a matrix.
        "float8 weights with tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        # Unless it is asked for by the option.
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
    # Later GPUs split activations, too, but the kernel was not measured there.
    splits = dtype == torch.bfloat16 and capability is not None and capability[0] == 9
    return max_packed_float8_rows(has_blocks=scales == BLOCKS, splits=splits)


class LoadedFloat8:
    """A linear module that has a quantization method of vLLM's.

    Args:
        packs: prepare it for few decodes, if its memory is as Rose's kernel reads it.
        gated: it is the first one of a gated MLP.

    Attributes:
        unread: why Rose's kernel cannot read it; None if it can, or has not been asked to.
        has_nan: one bool on the module's device, of a weight that has just been read by ``read``: whether it has a
            number that is none.
    """

    unread: str | None = None
    has_nan: torch.Tensor | None = None

    def __init__(self, module: Any, *, packs: bool, gated: bool) -> None:
        self._module, self._packs, self._gated = module, packs, gated

    def read(self) -> Linear:
        """Return the product as it is loaded now. All its tensors are vLLM's."""
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
        """vLLM's, which the method multiplies with; None of a method without one."""
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
        """Return the layer on vLLM's memory; None if Rose's kernel would read something else in it than vLLM's."""
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
    """Return how one of vLLM's kernels quantizes a module's input; None if Rose's do not so to the same bits."""
    name, by_group = type(kernel).__name__, type(kernel).__name__ in BLOCK_KERNELS
    if name not in QUANTIZED_KERNELS or kernel.config.out_dtype is None:
        return None
    if by_group and module.input_size_per_partition % SCALED_BLOCK:
        return None
    quantize = kernel.quant_fp8
    # What vLLM can compile in the place of its kernel rounds otherwise.
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
    """Return what a kernel's ``apply_weights`` makes of the input that it has quantized."""
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
    """Return whether an e4m3 weight has a code that is no number, on its device. Rose's kernel takes it for 480."""
    bits = values.view(torch.uint8)
    parts = bits.split(max(_CHECKED_BYTES // bits.shape[1], 1))
    return torch.stack([(part & 0x7F).amax() for part in parts]).amax() == 0x7F
