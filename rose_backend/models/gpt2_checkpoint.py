"""GPT-2's configuration and weights, read and checked from a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose_backend.errors import ModelError
from rose_backend.models.weight_loading import CONFIG_FILE, CheckpointTensors, read_json

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")

HEAD_ALIGNMENT = 64
"""Matrix products whose width is no multiple of a tile are several times slower on a GPU; 50,257 is none."""


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """Sizes and types of a loaded GPT-2."""

    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int
    n_positions: int
    layer_norm_epsilon: float
    eos_token_id: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors; matrices are [in, out]."""

    ln_1_weight: torch.Tensor
    ln_1_bias: torch.Tensor
    qkv_weight: torch.Tensor
    """[E, 3 * E]: query, key and value side by side."""
    qkv_bias: torch.Tensor
    attn_proj_weight: torch.Tensor
    attn_proj_bias: torch.Tensor
    ln_2_weight: torch.Tensor
    ln_2_bias: torch.Tensor
    fc_weight: torch.Tensor
    """[E, I]"""
    fc_bias: torch.Tensor
    fc_proj_weight: torch.Tensor
    """[I, E]"""
    fc_proj_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class GPT2Weights:
    """All tensors of a GPT-2."""

    token_embedding: torch.Tensor
    """[V, E]"""
    position_embedding: torch.Tensor
    """[n_positions, E]"""
    layers: tuple[LayerWeights, ...]
    final_norm_weight: torch.Tensor
    final_norm_bias: torch.Tensor
    padded_lm_head: torch.Tensor
    """[V', E]: the head, and rows of zeros behind it up to a multiple of ``HEAD_ALIGNMENT``. The token embedding is a
    part of it where the two are tied."""

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, E]"""
        return self.padded_lm_head[: self.token_embedding.shape[0]]


def read_gpt2(directory: Path, *, dtype: str, device: str) -> tuple[GPT2Config, GPT2Weights]:
    """Read a checkpoint.

    Raises:
        ModelError: something is missing, damaged or not supported; the message names it.
    """
    fields = read_json(directory / CONFIG_FILE)
    _refuse_unsupported(fields)
    tensors = CheckpointTensors(directory)
    prefix = "transformer." if "transformer.wte.weight" in tensors else ""
    n_embd = _read_int(fields, "n_embd")
    n_head = _read_int(fields, "n_head")
    if n_embd % n_head:
        raise ModelError(f"config.json: n_embd={n_embd} is not a multiple of n_head={n_head}")
    vocab_size = _read_int(fields, "vocab_size")
    token_embedding = tensors.read(f"{prefix}wte.weight", (vocab_size, n_embd))
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=_read_int(fields, "n_layer"),
        n_head=n_head,
        n_embd=n_embd,
        n_inner=4 * n_embd if fields.get("n_inner") is None else _read_int(fields, "n_inner"),
        n_positions=_read_int(fields, "n_positions"),
        layer_norm_epsilon=float(fields.get("layer_norm_epsilon", 1e-5)),
        eos_token_id=_read_eos_token_id(fields),
        dtype=_choose_dtype(dtype, device, token_embedding.dtype),
        device=torch.device(device),
    )
    tied = bool(fields.get("tie_word_embeddings", True))
    return config, _read_weights(tensors, prefix, config, token_embedding, tied=tied)


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    activation = fields.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: activation_function={activation!r} is not supported, allowed are {', '.join(_ACTIVATIONS)}"
        )
    for name, supported in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if bool(fields.get(name, supported)) is not supported:
            raise ModelError(f"config.json: {name}={fields[name]!r} is not supported")
    if fields.get("quantization_config") is not None:
        raise ModelError(
            "config.json: quantization_config is not supported, an unquantised checkpoint is needed"
        )


def _read_int(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _read_eos_token_id(fields: dict[str, Any]) -> int | None:
    value = fields.get("eos_token_id")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelError(f"config.json: eos_token_id must be one integer, got {value!r}")
    return value


def _choose_dtype(dtype: str, device: str, stored: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        if stored in (torch.float16, torch.bfloat16):
            return stored
        # As vLLM does: checkpoints in float32 are meant to be served in half of that.
        has_bfloat16 = torch.cuda.get_device_capability(device)[0] >= 8
        return torch.bfloat16 if has_bfloat16 else torch.float16
    if dtype not in _DTYPES:
        raise ModelError(f"dtype: got {dtype!r}, allowed are auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _read_weights(
    tensors: CheckpointTensors,
    prefix: str,
    config: GPT2Config,
    token_embedding: torch.Tensor,
    *,
    tied: bool,
) -> GPT2Weights:
    width, inner = config.n_embd, config.n_inner

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=config.device, dtype=config.dtype)

    def read(name: str, *shape: int) -> torch.Tensor:
        return place(tensors.read(prefix + name, shape))

    layers = tuple(
        LayerWeights(
            ln_1_weight=read(f"h.{i}.ln_1.weight", width),
            ln_1_bias=read(f"h.{i}.ln_1.bias", width),
            qkv_weight=read(f"h.{i}.attn.c_attn.weight", width, 3 * width),
            qkv_bias=read(f"h.{i}.attn.c_attn.bias", 3 * width),
            attn_proj_weight=read(f"h.{i}.attn.c_proj.weight", width, width),
            attn_proj_bias=read(f"h.{i}.attn.c_proj.bias", width),
            ln_2_weight=read(f"h.{i}.ln_2.weight", width),
            ln_2_bias=read(f"h.{i}.ln_2.bias", width),
            fc_weight=read(f"h.{i}.mlp.c_fc.weight", width, inner),
            fc_bias=read(f"h.{i}.mlp.c_fc.bias", inner),
            fc_proj_weight=read(f"h.{i}.mlp.c_proj.weight", inner, width),
            fc_proj_bias=read(f"h.{i}.mlp.c_proj.bias", width),
        )
        for i in range(config.n_layer)
    )
    padded_embedding = place(_pad_rows(token_embedding))
    return GPT2Weights(
        token_embedding=padded_embedding[: config.vocab_size],
        position_embedding=read("wpe.weight", config.n_positions, width),
        layers=layers,
        final_norm_weight=read("ln_f.weight", width),
        final_norm_bias=read("ln_f.bias", width),
        padded_lm_head=_read_lm_head(tensors, config, token_embedding, padded_embedding, tied=tied),
    )


def _pad_rows(matrix: torch.Tensor) -> torch.Tensor:
    num_rows, width = matrix.shape
    padded = matrix.new_zeros((-(-num_rows // HEAD_ALIGNMENT) * HEAD_ALIGNMENT, width))
    padded[:num_rows] = matrix
    return padded


def _read_lm_head(
    tensors: CheckpointTensors,
    config: GPT2Config,
    stored_embedding: torch.Tensor,
    padded_embedding: torch.Tensor,
    *,
    tied: bool,
) -> torch.Tensor:
    if tied and "lm_head.weight" not in tensors:
        return padded_embedding
    head = tensors.read("lm_head.weight", (config.vocab_size, config.n_embd))
    if not tied:
        return _pad_rows(head).to(device=config.device, dtype=config.dtype)
    if not torch.equal(head, stored_embedding):
        raise ModelError("config.json: tie_word_embeddings is on, but lm_head.weight differs from wte.weight")
    return padded_embedding
