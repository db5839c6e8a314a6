"""Int4 weights of vLLM's linear modules for Rose's layers, in the one form that Rose's kernels read.

vLLM's quantization methods make a module's parameters, and its loaders fill them with this rank's part of a checkpoint.
Where vLLM would rearrange them for a kernel of its own, as Machete's or Marlin's, Rose's method puts an ``Int4Weight``
in their place, module after module, so that each weight is in memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
from vllm.platforms import current_platform

from rose_backend.config import PluginConfig
from rose_backend.errors import IntegrityError, ModelError
from rose_backend.kernels import (
    Int4Weight,
    QuantizedActivations,
    pack_linear,
    quantized_linear,
    small_batch_linear,
)
from rose_backend.kernels.arguments import INT4_GROUPS
from rose_backend.kernels.linear.int4_formats import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ_V2,
    Int4Format,
    StoredInt4,
    store_int4,
)
from rose_backend.layers.decoder import max_packed_int4_rows
from rose_backend.layers.linear import Linear
from rose_backend.vllm_plugin.options import first_reason

METHODS = (
    *("CompressedTensorsLinearMethod", "AutoGPTQLinearMethod"),
    *("AutoAWQMarlinLinearMethod", "AutoAWQLinearMethod"),
)
"""vLLM's, whose parameters are as a checkpoint has them until they are processed."""
SCHEME = "CompressedTensorsWNA16"
"""The one of vLLM's compressed-tensors method that multiplies such weights by activations in 16 bits."""


class Int4Scheme(NamedTuple):
    """How all int4 weights of a model are stored."""

    form: Int4Format
    group_size: int | None
    """Columns that share a scale; None: all of a row's."""
    has_zeros: bool
    """They are stored, and may differ; else all are ``INT4_ZERO``, whatever is stored, as for vLLM's kernels."""

    def describe(self) -> str:
        """Return it in a few words."""
        columns = "a row" if self.group_size is None else f"{self.group_size} columns"
        return f"int4 weights with a scale{' and a zero' if self.has_zeros else ''} for {columns}"

    def empty(
        self, num_rows: int, num_columns: int, scales_dtype: torch.dtype, device: torch.device
    ) -> Int4Weight:
        """Return memory for a matrix."""
        return Int4Weight.empty(
            num_rows,
            num_columns,
            self.group_size or num_columns,
            has_zeros=self.has_zeros,
            scales_dtype=scales_dtype,
            device=device,
        )


def int4_scheme(quant_config: Any) -> Int4Scheme | None:
    """Return how a model's int4 weights are stored; None if its weights are quantized otherwise.

    Args:
        quant_config: vLLM's ``QuantizationConfig``, or None.
    """
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    # Subclasses may differ.
    kind = type(quant_config)
    if kind is AutoAWQConfig:
        is_known = quant_config.weight_bits == 4 and quant_config.zero_point
        return _scheme(AWQ, quant_config.group_size, has_zeros=True) if is_known else None
    if kind is AutoGPTQConfig:
        # Rules that begin otherwise change single modules; these leave them in 16 bits.
        is_one = all(pattern.startswith("-:") for pattern in quant_config.dynamic)
        is_known = quant_config.weight_bits == 4 and quant_config.is_sym and is_one
        return _scheme(GPTQ_V2, quant_config.group_size, has_zeros=False) if is_known else None
    return _compressed_scheme(quant_config) if kind is CompressedTensorsConfig else None


def _scheme(form: Int4Format, group_size: int | None, *, has_zeros: bool) -> Int4Scheme | None:
    if group_size in (None, -1):
        return Int4Scheme(form, None, has_zeros)
    return Int4Scheme(form, group_size, has_zeros) if group_size in INT4_GROUPS else None


def _compressed_scheme(quant_config: Any) -> Int4Scheme | None:
    """Return the scheme of a compressed-tensors model, if all its groups have the same."""
    if quant_config.transform_config is not None:
        return None
    found = set()
    for scheme in quant_config.target_scheme_map.values():
        weights = scheme.get("weights")
        is_quantized = any(scheme.get(name) for name in ("input_activations", "output_activations"))
        form = scheme.get("format") or quant_config.quant_format
        is_packed = form == "pack-quantized" and weights is not None and weights.num_bits == 4
        if is_quantized or not is_packed or weights.type != "int":
            return None
        if not quant_config._is_wNa16_group_channel(weights, None):
            return None
        group_size = None if weights.strategy == "channel" else weights.group_size
        found.add(_scheme(COMPRESSED_TENSORS, group_size, has_zeros=not weights.symmetric))
    return found.pop() if len(found) == 1 else None


def why_int4_stays() -> str | None:
    """Return why vLLM's layers run a model with int4 weights; None if Rose's can."""
    reasons = {
        "int4 weights without a CUDA device": not current_platform.is_cuda(),
        "VLLM_MARLIN_INPUT_DTYPE": envs.VLLM_MARLIN_INPUT_DTYPE is not None,
    }
    return first_reason(reasons)


def max_int4_rows(options: PluginConfig) -> int:
    """Return how many decodes multiply int4 weights by Rose's kernel as they are."""
    return max_packed_int4_rows() if options.max_quantized_rows is None else options.max_quantized_rows


def product_alone(
    weight: Int4Weight,  # [O, E]
    bias: torch.Tensor | None,  # [O]
    max_rows: int,
) -> Callable[[torch.Tensor | QuantizedActivations], torch.Tensor]:
    """Return a product for layers that are not packed: by Rose's kernel, too, of at most so many rows."""
    layer = pack_linear(weight, bias)

    def multiply(x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "nothing quantizes its input"
        return small_batch_linear(x, layer) if len(x) <= max_rows else quantized_linear(x, weight, bias)

    return multiply


def added_bias(module: Any) -> torch.Tensor | None:
    """Return the bias that this rank adds, [O]; None: it adds none."""
    # Rank 0 adds the one that all ranks' sum needs once, as vLLM's module does.
    is_added = module.bias is not None and not (isinstance(module, RowParallelLinear) and module.tp_rank > 0)
    return module.bias.data if is_added else None


class RoseInt4Method(LinearMethodBase):  # type: ignore[misc]
    """One linear module, as vLLM's method of it: what is loaded becomes an ``Int4Weight``.

    A reload copies what it makes to where the first one was, as vLLM's reloads do with all that a method makes.

    Args:
        max_rows: of a product by Rose's kernel, where it is not packed.
        packs: prepare it for few decodes.
        gated: it is the first one of a gated MLP.
    """

    supports_pre_processed_weights = False

    def __init__(self, module: Any, scheme: Int4Scheme, *, max_rows: int, packs: bool, gated: bool) -> None:
        self._max_rows = max_rows
        self._module, self._scheme, self._vllms = module, scheme, module.quant_method
        self._packs, self._gated = packs, gated
        names = [type(self._vllms).__name__]
        if names == ["CompressedTensorsLinearMethod"]:
            names.append(type(module.scheme).__name__)
        if names[0] not in METHODS or names[1:] not in ([], [SCHEME]):
            raise ModelError(
                f"{module.prefix}: Rose's layers do not take int4 weights of {' with '.join(names)}"
            )
        module.quant_method = self

    def create_weights(self, *args: Any, **options: Any) -> None:
        """Leave parameters to vLLM's method."""
        self._vllms.create_weights(*args, **options)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put an ``Int4Weight`` in the place of what was loaded.

        Raises:
            ShapeError: vLLM has loaded tensors that do not fit.
        """
        form = self._scheme.form
        stored = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False)}
        codes, scales = stored[form.codes.name], stored[form.scales_name]
        num_rows, depth = self._module.output_size_per_partition, self._module.input_size_per_partition
        weight = self._scheme.empty(num_rows, depth, scales.dtype, codes.device)
        weight.check()
        zeros = None if weight.zeros is None else stored[form.zeros.name]
        store_int4(weight, slice(None), form, StoredInt4(codes, scales, zeros, None), self._module.prefix)
        # A known shape stays: vLLM's reloads load it once more when all else is loaded.
        for name in stored.keys() & {form.codes.name, form.scales_name, form.zeros.name}:
            delattr(layer, name)
        for name, tensor in self._tensors(weight).items():
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def _tensors(self, weight: Int4Weight) -> dict[str, torch.Tensor]:
        """Return a weight's tensors by the names of those whose place they take."""
        form = self._scheme.form
        tensors = {form.codes.name: weight.words, form.scales_name: weight.scales}
        return tensors if weight.zeros is None else {**tensors, form.zeros.name: weight.zeros}

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: the module is never called, as Rose's layers multiply by its weight."""
        raise IntegrityError(f"{layer.prefix}: a linear module of Rose's layers was called")

    def read(self) -> Linear:
        """Return the product as it is loaded now."""
        module, form = self._module, self._scheme.form
        words, scales = getattr(module, form.codes.name).data, getattr(module, form.scales_name).data
        zeros = getattr(module, form.zeros.name).data if self._scheme.has_zeros else None
        weight = Int4Weight(words, scales, zeros, module.input_size_per_partition)
        bias = added_bias(module)
        if self._packs:
            return Linear(weight, bias, pack_linear(weight, bias, gated=self._gated))
        return Linear(weight, bias, many_rows=product_alone(weight, bias, self._max_rows))
