"""Int4 weights of vLLM's linear modules for Rose's layers, in the one form that Rose's kernels read.

vLLM's quantization methods make a module's parameters, and its loaders fill them with this rank's part of a checkpoint.
vLLM then rearranges them for one of its kernels, such as Machete or Marlin. Rose's method puts an ``Int4Weight`` in
their place instead, module after module, so that each weight is in memory once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear

from rose_backend.errors import IntegrityError, ModelError
from rose_backend.kernels import Int4Weight, pack_linear
from rose_backend.kernels.linear.int4_formats import StoredInt4, store_int4
from rose_backend.layers.linear import Linear, int4_product
from rose_backend.vllm_plugin.models.int4_weights import Int4Scheme

METHODS = (
    *("CompressedTensorsLinearMethod", "AutoGPTQLinearMethod"),
    *("AutoAWQMarlinLinearMethod", "AutoAWQLinearMethod"),
)
"""vLLM's quantization methods that keep the checkpoint's format until ``process_weights_after_loading``."""
SCHEME = "CompressedTensorsWNA16"
"""vLLM's compressed-tensors scheme for such weights with activations in 16 bits."""


def added_bias(module: Any) -> torch.Tensor | None:
    """Return the bias that this rank adds, [O]; None: it adds none."""
    # With row parallelism ranks' products are summed, so only rank 0 adds the bias, as in vLLM's module.
    is_added = module.bias is not None and not (isinstance(module, RowParallelLinear) and module.tp_rank > 0)
    return module.bias.data if is_added else None


class RoseInt4Method(LinearMethodBase):  # type: ignore[misc]
    """Quantization method of one linear module, which turns the loaded weight into an ``Int4Weight``.

    When weights are reloaded, vLLM copies the new ``Int4Weight`` to the address of the first, as for all methods.

    Args:
        max_rows: largest step that is multiplied by Rose's kernel if it is not a small batch; a library multiplies
            larger ones.
        packs: prepare it for small batches.
        gated: whether it is the gate and up projection of a gated MLP.
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
        """Let vLLM's method create the parameters, in the checkpoint's format."""
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
        # All else stays: vLLM's reloads load a known shape once more when the rest is loaded.
        made = {
            form.codes.name: weight.words,
            form.scales_name: weight.scales,
            form.zeros.name: weight.zeros,
        }
        for name, tensor in made.items():
            parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, parameter)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: the module is never called, as Rose's layers multiply by its weight."""
        raise IntegrityError(f"{layer.prefix}: a linear module of Rose's layers was called")

    def read(self) -> Linear:
        """Return the layer with the weights that are loaded now."""
        module, form = self._module, self._scheme.form
        words, scales = getattr(module, form.codes.name).data, getattr(module, form.scales_name).data
        zeros = getattr(module, form.zeros.name).data if self._scheme.has_zeros else None
        weight = Int4Weight(words, scales, zeros, module.input_size_per_partition)
        bias = added_bias(module)
        packed = pack_linear(weight, bias, gated=self._gated) if self._packs else None
        return Linear(weight, bias, packed, many_rows=int4_product(weight, bias, self._max_rows))
