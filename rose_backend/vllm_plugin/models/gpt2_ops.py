"""GPT-2's fused operations as torch library operations ``rose::*``: torch.compile takes each as one opaque node."""

from __future__ import annotations

import torch

from rose_backend import kernels

_LIBRARY = torch.library.Library("rose", "FRAGMENT")


def _bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> None:
    kernels.bias_gelu(x, bias)


def _bias_residual(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> None:
    kernels.bias_residual(x, bias, residual)


def _fake_in_place(*tensors: torch.Tensor) -> None:
    return None


def _fake_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def _fake_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


_OPERATIONS = (
    ("bias_gelu(Tensor(a!) x, Tensor bias) -> ()", _bias_gelu, _fake_in_place),
    ("bias_residual(Tensor(a!) x, Tensor bias, Tensor residual) -> ()", _bias_residual, _fake_in_place),
    (
        "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
        kernels.layer_norm,
        _fake_layer_norm,
    ),
    (
        "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
        kernels.add_layer_norm,
        _fake_add_layer_norm,
    ),
)

for _schema, _function, _fake in _OPERATIONS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rose::{_name}", _fake, lib=_LIBRARY)

bias_gelu = torch.ops.rose.bias_gelu
"""``x`` [T, I] becomes ``gelu(x + bias)``."""
bias_residual = torch.ops.rose.bias_residual
"""``x`` [T, E] becomes ``x + bias + residual``."""
layer_norm = torch.ops.rose.layer_norm
add_layer_norm = torch.ops.rose.add_layer_norm
"""Returns ``(layer_norm(x + residual), x + residual)``."""
