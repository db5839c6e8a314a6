"""Sizes and types of a model, in the words of Hugging Face's and vLLM's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rose_backend.errors import ModelError
from rose_backend.kernels.arguments import MAX_EXPERTS
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.models.quantization import Quantization, read_quantization
from rose_backend.models.weights import read_eos_token_ids

MAX_SIZE = 2**24
"""Of anything that config.json counts: more is a mistake, found before memory is asked for."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Width of an expert's gated MLP."""
    renormalize: bool
    """The weights of a token's experts sum up to 1."""
    sparse_layers: tuple[bool, ...]
    """Which layers have experts; the others have an MLP of the model's ``intermediate_size``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What an engine has to know of a decoder-only model."""

    vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    max_position_embeddings: int
    """Prompt plus output, in tokens, at most."""
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    dtype: torch.dtype
    device: torch.device
    gated_mlp: bool = False
    """The MLP multiplies two projections, both ``intermediate_size`` wide."""
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None
    """Of matrices that are stored in 8 bits."""

    @property
    def activation_width(self) -> int:
        """Numbers per token that a step holds at most: residual, normed, QKV, attention's output, MLP, one spare."""
        attention = 2 * (self.num_attention_heads + self.num_kv_heads) * self.head_size
        mlp = self.intermediate_size * (3 if self.gated_mlp else 1)
        if (experts := self.experts) is not None:
            # Activation and output of each expert, and a list of four bytes for each pair that there could be.
            sparse = experts.top_k * (experts.intermediate_size + self.hidden_size)
            mlp = max(mlp, sparse + 2 * experts.num_experts)
        return 3 * self.hidden_size + attention + mlp

    @classmethod
    def from_hf(
        cls,
        fields: Mapping[str, Any],
        *,
        names: Mapping[str, str],
        dtype: torch.dtype,
        device: str,
        gated_mlp: bool = False,
        norm_eps: float = 1e-5,
        tie_word_embeddings: bool = True,
    ) -> ModelConfig:
        """Read config.json.

        Args:
            names: what a family calls fields that have other names elsewhere (transformers' ``attribute_map``), and the
                name of ``norm_eps``.
            norm_eps, tie_word_embeddings: where ``fields`` do not say.

        Raises:
            ModelError: a field is missing or not supported; the message names it.
        """

        def read(name: str, default: int | None = None) -> int:
            return read_size(fields, names.get(name, name), default)

        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads")
        num_kv_heads = read("num_key_value_heads", num_heads)
        multiples = [("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)]
        if fields.get("head_dim") is None:
            multiples.append(("hidden_size", hidden_size, "num_attention_heads", num_heads))
        for name, value, of_name, of in multiples:
            if value % of:
                name, of_name = names.get(name, name), names.get(of_name, of_name)
                raise ModelError(f"config.json: {name}={value} is not a multiple of {of_name}={of}")
        return cls(
            vocab_size=read("vocab_size"),
            num_layers=read("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=read("head_dim", hidden_size // num_heads),
            hidden_size=hidden_size,
            intermediate_size=read("intermediate_size", 4 * hidden_size),
            max_position_embeddings=read("max_position_embeddings"),
            norm_eps=_read_eps(fields, names["norm_eps"], norm_eps),
            eos_token_ids=read_eos_token_ids(fields, "config.json"),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", tie_word_embeddings)),
            dtype=dtype,
            device=torch.device(device),
            gated_mlp=gated_mlp,
            quantization=read_quantization(fields),
        )


def read_size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size or a count of config.json.

    Args:
        default: where the field is missing or null; None: there is none.

    Raises:
        ModelError: it is not an integer from 1 to ``MAX_SIZE``.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, got {value!r}")
    if value > MAX_SIZE:
        raise ModelError(f"config.json: {name} must be at most {MAX_SIZE}, got {value!r}")
    return value


def read_experts(fields: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the sizes of the experts, and which layers have them; transformers' defaults hold for what is missing.

    Raises:
        ModelError: a field has a value that no model can have; the message names it.
    """
    # transformers 5 writes the second name.
    name = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    num_experts, top_k = read_size(fields, name, 128), read_size(fields, "num_experts_per_tok", 8)
    if num_experts > MAX_EXPERTS:
        raise ModelError(f"config.json: {name} must be at most {MAX_EXPERTS}, got {num_experts}")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok must be at most {name}={num_experts}, got {top_k}"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_size(fields, "moe_intermediate_size", 768),
        renormalize=bool(fields.get("norm_topk_prob", False)),
        sparse_layers=_sparse_layers(fields, num_layers),
    )


def _sparse_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step, dense = read_size(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r}")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def check_supported(fields: Mapping[str, Any], supported: Mapping[str, bool | tuple[Any, ...]]) -> None:
    """Refuse values of config.json that a model family does not compute.

    Args:
        supported: of each field the only value, or the allowed ones, the first of which is the default.

    Raises:
        ModelError: names the field and what it has.
    """
    for name, allowed in supported.items():
        if isinstance(allowed, bool):
            if bool(fields.get(name, allowed)) is not allowed:
                raise ModelError(f"config.json: {name}={fields[name]!r} is not supported")
        elif (value := fields.get(name, allowed[0])) not in allowed:
            listed = ", ".join("null" if each is None else str(each) for each in allowed)
            raise ModelError(f"config.json: {name}={value!r} is not supported, allowed are {listed}")


def check_window(fields: Mapping[str, Any], num_positions: int, num_layers: int) -> None:
    """Refuse sliding windows, unless every request fits into one.

    Args:
        num_positions: tokens of the longest request.

    Raises:
        ModelError: layers slide, or are of another kind that is not known; names the field, and the option that helps.
    """
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types must be a list, got {kinds!r}")
    kinds = kinds[:num_layers]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"config.json: layer_types has {kind!r}, which is not supported")
    window = fields.get("sliding_window")
    if window is not None and type(window) is not int:
        raise ModelError(f"config.json: sliding_window must be an integer, got {window!r}")
    if window is None and "sliding_attention" in kinds:
        raise ModelError("config.json: layer_types has 'sliding_attention', but sliding_window is missing")
    slides = "sliding_attention" in kinds or fields.get("use_sliding_window", True)
    if window is not None and slides and window < num_positions:
        raise ModelError(
            f"config.json: sliding_window={window!r} is not supported for {num_positions} tokens; it changes nothing "
            f"with a max_model_len of {window} or less"
        )


def _read_eps(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = default if fields.get(name) is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ModelError(f"config.json: {name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def choose_dtype(dtype: str, device: str, stored: torch.dtype) -> torch.dtype:
    """Return the type to compute in.

    Args:
        dtype: ``auto`` is float32 on a CPU, ``stored`` elsewhere, and for float32 half of that, as in vLLM.
        stored: of the checkpoint's tensors.

    Raises:
        ModelError: ``dtype`` is not supported.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ModelError(f"dtype: got {dtype!r}, allowed are auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if torch.device(device).type == "cpu":
        return torch.float32
    if stored in (torch.float16, torch.bfloat16):
        return stored
    has_bfloat16 = gpu_properties(torch.device(device)).capability[0] >= 8
    return torch.bfloat16 if has_bfloat16 else torch.float16
