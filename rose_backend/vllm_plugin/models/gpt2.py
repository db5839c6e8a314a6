"""GPT-2 for vLLM with Rose's fused operations. Parameters, names and weight loading are vLLM's own.

With ``fused_mlp`` bias + GELU and bias + residual are one operation each; with ``fused_add_layernorm`` every other
residual add happens inside the LayerNorm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel, GPT2Model
from vllm.sequence import IntermediateTensors

from rose_backend.kernels.pointwise import ops
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.patch_ledger import swapped

# torch.compile takes each of the operations ``rose::*`` as one opaque node.
_LIBRARY = torch.library.Library("rose", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Any], num_outputs: int) -> None:
    """Make an operation of a kernel, which returns that many tensors like its first one, or writes to that one."""

    def run_in_place(*tensors: torch.Tensor) -> None:
        kernel(*tensors)

    def fake(x: torch.Tensor, *others: Any) -> Any:
        outputs = tuple(torch.empty_like(x) for _ in range(num_outputs))
        return outputs[0] if num_outputs == 1 else outputs or None

    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel if num_outputs else run_in_place, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rose::{name}", fake, lib=_LIBRARY)


_NORM = "Tensor weight, Tensor bias, float eps"
_define("bias_gelu(Tensor(a!) x, Tensor bias) -> ()", ops.bias_gelu, 0)
_define("bias_residual(Tensor(a!) x, Tensor bias, Tensor residual) -> ()", ops.bias_residual, 0)
_define(f"layer_norm(Tensor x, {_NORM}) -> Tensor", ops.layer_norm, 1)
_define(f"add_layer_norm(Tensor x, Tensor residual, {_NORM}) -> (Tensor, Tensor)", ops.add_layer_norm, 2)

bias_gelu = torch.ops.rose.bias_gelu
"""``x`` [T, I] becomes ``gelu(x + bias)``."""
bias_residual = torch.ops.rose.bias_residual
"""``x`` [T, E] becomes ``x + bias + residual``."""
layer_norm = torch.ops.rose.layer_norm
add_layer_norm = torch.ops.rose.add_layer_norm
"""Returns ``(layer_norm(x + residual), x + residual)``."""


# The signature's annotations are strings here, so vLLM cannot infer which dimensions vary.
@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "position_ids": 0, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class RoseGPT2Model(GPT2Model):  # type: ignore[misc]
    """The decoder. Blocks keep vLLM's modules; this class runs them in another order of additions."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = rose_options(vllm_config)
        self.fused_mlp = options.fused_mlp
        self.fused_add_layernorm = options.fused_add_layernorm
        if self.fused_mlp:
            for block in islice(self.h, self.start_layer, self.end_layer):
                # Under tensor parallelism the bias then comes after the sum over ranks, on every rank alike.
                block.mlp.c_fc.skip_bias_add = True
                block.mlp.c_proj.skip_bias_add = True

    # Not the inherited forward: vLLM's compile cache tells models apart by it.
    def forward(
        self,
        input_ids: torch.Tensor | None,  # [T] int64
        position_ids: torch.Tensor,  # [T] int64
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,  # [T, E]
    ) -> torch.Tensor | IntermediateTensors:
        """Run this rank's blocks; return [T, E] after the final LayerNorm, or what the next pipeline stage needs."""
        if intermediate_tensors is not None:
            residual = intermediate_tensors["hidden_states"]
        else:
            embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = embedded + self.wpe(position_ids)
        # Output of the last block that is not yet added to the residual.
        delta: torch.Tensor | None = None
        block: Any
        for block in islice(self.h, self.start_layer, self.end_layer):
            normed, residual = self._add_norm(delta, residual, block.ln_1)
            normed, residual = self._add_norm(block.attn(normed), residual, block.ln_2)
            delta, residual = self._mlp(block.mlp, normed, residual)
        if get_pp_group().is_last_rank:
            return self._add_norm(delta, residual, self.ln_f)[0]
        return IntermediateTensors({"hidden_states": residual if delta is None else delta + residual})

    def _mlp(
        self, mlp: Any, normed: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return what is still to be added to the residual, or None, and the residual, both [T, E]."""
        if not self.fused_mlp:
            return mlp(normed), residual
        wide, bias = mlp.c_fc(normed)
        bias_gelu(wide, bias)
        output, bias = mlp.c_proj(wide)
        bias_residual(output, bias, residual)
        return None, output

    def _add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``norm(delta + residual)`` and ``delta + residual``, both [T, E]."""
        if delta is None:
            return layer_norm(residual, norm.weight, norm.bias, norm.eps), residual
        if self.fused_add_layernorm:
            return add_layer_norm(delta, residual, norm.weight, norm.bias, norm.eps)
        residual = delta + residual
        return norm(residual), residual


class RoseGPT2LMHeadModel(GPT2LMHeadModel):  # type: ignore[misc]
    """``GPT2LMHeadModel`` around ``RoseGPT2Model``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with swapped("gpt2_inner_model", RoseGPT2Model):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
