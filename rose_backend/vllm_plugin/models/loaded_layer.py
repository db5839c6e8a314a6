"""The weights of a decoder layer that vLLM loads and shards, as Rose's loop over layers takes them.

They stay where vLLM has put them, so that each is in memory once and captured graphs keep its address. Packed layers
are overwritten by their packed form when all is loaded, because a matrix takes in the norm in front of it, which vLLM
loads as another module: the first time, and again in each reload.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from rose_backend.errors import IntegrityError, ModelError
from rose_backend.layers.linear import DecoderLayer, Linear, Mlp, Norm, pack
from rose_backend.vllm_plugin.models.model_choice import KEEP_OPTION


class RoseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Leaves a loaded weight as it is, also on a CPU, where vLLM would repack it and drop the original."""

    supports_pre_processed_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.is_new = True
        """The weight is as vLLM loads it."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Note that the weight was loaded."""
        self.is_new = True

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: the module is never called, as its weight may be packed."""
        raise IntegrityError(f"{layer.prefix}: a linear module of Rose's layers was called")


class LoadedLayer:
    """One decoder layer.

    Args:
        layer: vLLM's ``LlamaDecoderLayer`` or one like it.
        packs: prepare it for small batches; see ``layers.linear.pack_layer``.
        unit: [E], all 1: what is left of a folded norm.
    """

    def __init__(self, layer: Any, *, packs: bool, unit: torch.Tensor) -> None:
        self._layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        in_front = (layer.input_layernorm, None, layer.post_attention_layernorm, None)
        modules = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        self._products = [
            _Product(module, norm, packs=packs, gated=module is mlp.gate_up_proj)
            for module, norm in zip(modules, in_front, strict=True)
        ]
        self._unit = unit if packs else None

    def update(self) -> DecoderLayer:
        """Return the layer as it is loaded now; what an earlier call returned is up to date, too.

        Raises:
            ModelError: a norm was reloaded without the matrix that it is folded into. The matrix stays as it was.
        """
        attention = self._layer.self_attn
        qkv, attn_out, widen, narrow = [product.update() for product in self._products]
        # All that is new is packed by now, whatever else is missing.
        for product in self._products:
            product.check_norm()
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return DecoderLayer(
            self._norm(self._layer.input_layernorm),
            qkv,
            attn_out,
            self._norm(self._layer.post_attention_layernorm),
            Mlp(widen, narrow),
            None if query_norm is None else query_norm.weight.data,
            None if key_norm is None else key_norm.weight.data,
        )

    def _norm(self, module: Any) -> Norm:
        norm = norm_of(module)
        return norm if self._unit is None else Norm(self._unit, None, norm.eps)


class _Product:
    """One linear module, with the norm in front of it where that is folded in."""

    def __init__(self, module: Any, norm: Any | None, *, packs: bool, gated: bool) -> None:
        self._module, self._norm = module, norm
        self._packs, self._gated = packs, gated
        self._method = module.quant_method = RoseLinearMethod()
        self._was_new = True
        self._linear: Linear | None = None
        self._folded: torch.Tensor | None = None  # [E]: the norm's weight that the matrix has taken in

    def update(self) -> Linear:
        self._was_new, self._method.is_new = self._method.is_new, False
        if self._packs and self._was_new:
            self._pack()
        elif self._linear is None:
            self._linear = self._loaded()
        assert self._linear is not None, "the first call finds new weights"
        return self._linear

    def check_norm(self) -> None:
        if self._folded is None or self._was_new:
            return
        if torch.equal(self._folded, self._norm.weight.data):  # type: ignore[union-attr]
            return
        raise ModelError(
            f"the RMSNorm in front of {self._module.prefix} was reloaded without that module's weights, which it is "
            f"folded into: reload both, or keep vLLM's layers with {KEEP_OPTION}"
        )

    def _loaded(self) -> Linear:
        module = self._module
        # Rank 0 adds the bias that all ranks' sum needs once, as vLLM's module does.
        is_added = module.bias is not None and not (
            isinstance(module, RowParallelLinear) and module.tp_rank > 0
        )
        return Linear(module.weight.data.t(), module.bias.data if is_added else None)

    def _pack(self) -> None:
        norm = None if self._norm is None else norm_of(self._norm)
        packed = pack(self._loaded(), norm, gated=self._gated, in_place=True)
        if self._linear is None:
            self._linear = packed
            self._folded = None if norm is None else norm.weight.clone()
            for module in (self._module, self._norm):
                if module is not None:
                    # Weights that are not in a checkpoint's format are copied into what this returns.
                    module.get_parameter = self._refuse
            return
        # Graphs hold the addresses. The weight is in its place already.
        assert packed.packed is not None and self._linear.packed is not None, "they are packed"
        pairs = [
            (self._linear.bias, packed.bias),
            (self._linear.packed.bias, packed.packed.bias),
            (self._folded, None if norm is None else norm.weight),
        ]
        for old, new in pairs:
            if old is not None and new is not None:
                old.copy_(new)

    def _refuse(self, name: str) -> torch.nn.Parameter:
        raise ModelError(
            f"{self._module.prefix}.{name}: Rose's packed weights, and norms in front of them, are reloaded in a "
            f"checkpoint's format only, not with is_checkpoint_format=False; {KEEP_OPTION} keeps vLLM's layers"
        )


def norm_of(module: Any) -> Norm:
    """Return vLLM's ``RMSNorm``."""
    return Norm(module.weight.data, None, module.variance_epsilon)
