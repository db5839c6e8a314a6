"""LoRA adapters as PEFT stores them, and the LoRA slots of a model's layers, into which they are copied.

A folder with an adapter may come from anybody: names, sizes and types are checked before anything is read, and no call
keeps the interpreter lock for long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rose_backend.errors import ModelError
from rose_backend.kernels import Adapters
from rose_backend.layers.linear import DecoderLayer, Mlp
from rose_backend.models.config import ModelConfig
from rose_backend.models.streaming import Copy, stream
from rose_backend.models.weights import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    StoredTensor,
    find_stored,
    read_json,
    stored_dtype,
)

_MAX_JSON_BYTES = 1 << 20
"""Of the configuration, and of what the other file says of its tensors; read in some milliseconds."""
_PREFIX = "base_model.model.model.layers."
_MAX_SCALE = 1e4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT changes the base model's weights as it loads an adapter."""
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "use_bdlora"), ({}, None)),
    **dict.fromkeys(
        ("alora_invocation_tokens", "layer_replication", "target_parameters", "trainable_token_indices"),
        (None, [], {}),
    ),
}
"""Fields of ``ADAPTER_CONFIG_FILE`` that change what an adapter computes."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter whose files were checked. None of its tensors has been read."""

    rank: int
    scale: float
    pairs: Mapping[tuple[int, str], tuple[StoredTensor, StoredTensor]]
    """By layer and module: A ``[rank, E]`` and B ``[O, rank]``."""


def find_adapter(directory: Path, config: ModelConfig, max_rank: int) -> StoredAdapter:
    """Check an adapter of a model.

    Raises:
        ModelError: there is none, or it is damaged, not for this model or not supported; the message names the field
            or the tensor.
    """
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ModelError(f"model: directory {str(directory)!r} has no {name}")
    if (size := (directory / ADAPTER_CONFIG_FILE).stat().st_size) > _MAX_JSON_BYTES:
        raise ModelError(f"{ADAPTER_CONFIG_FILE}: got {size} bytes, allowed are at most {_MAX_JSON_BYTES}")
    rank, scale = _read_config(read_json(directory / ADAPTER_CONFIG_FILE), max_rank)
    stored = find_stored(directory / ADAPTER_WEIGHTS_FILE, max_header_bytes=_MAX_JSON_BYTES)
    expected = dict(_expected_tensors(config, rank))
    unknown = sorted(stored.keys() - expected)
    if unknown or not stored:
        got = f"tensor {unknown[0][:200]!r}" if unknown else "no tensors"
        raise ModelError(
            f"{ADAPTER_WEIGHTS_FILE}: got {got}, allowed are lora_A and lora_B of {', '.join(_widths(config))} of "
            f"{config.num_layers} layers"
        )
    pairs: dict[tuple[int, str], list[StoredTensor]] = {}
    for name, (key, shape) in expected.items():
        if name not in stored:
            continue
        if stored[name].shape != shape:
            raise ModelError(
                f"model: tensor {name!r} has shape {list(stored[name].shape)}, expected {list(shape)}"
            )
        if stored_dtype(stored[name]) not in _DTYPES:
            allowed = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ModelError(
                f"model: tensor {name!r} is stored as {stored[name].dtype}, allowed are {allowed}"
            )
        pairs.setdefault(key, []).append(stored[name])
    for found in pairs.values():
        if len(found) != 2:
            raise ModelError(f"model: tensor {found[0].name!r} lacks the other one of lora_A and lora_B")
    return StoredAdapter(rank, scale, {key: (a, b) for key, (a, b) in pairs.items()})


def _read_config(fields: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Return rank and scale."""
    for name, allowed in _ALLOWED.items():
        value = fields.get(name, allowed[0])
        if not any(value == each and type(value) is type(each) for each in allowed):
            shown = " or ".join(json.dumps(each) for each in allowed)
            raise ModelError(f"{ADAPTER_CONFIG_FILE}: {name}: got {repr(value)[:200]}, allowed is {shown}")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_OTHER_BASE):
        raise ModelError(
            f"{ADAPTER_CONFIG_FILE}: init_lora_weights: got {init[:50]!r}, allowed are those that leave the weights of "
            "the base model as they are; PEFT can convert such an adapter (path_initial_model_for_weight_conversion)"
        )
    rank = fields.get("r")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ModelError(
            f"{ADAPTER_CONFIG_FILE}: r: got {str(rank)[:50]}, allowed is an integer from 1 to {max_rank}, max_lora_rank"
        )
    is_stabilized: object = fields.get("use_rslora", False)
    alpha: Any = fields.get("lora_alpha")
    if type(is_stabilized) is not bool:
        raise ModelError(
            f"{ADAPTER_CONFIG_FILE}: use_rslora: got {repr(is_stabilized)[:50]}, allowed are true and false"
        )
    if type(alpha) not in (int, float) or not abs(alpha) <= _MAX_SCALE:  # NaN is not, either
        raise ModelError(
            f"{ADAPTER_CONFIG_FILE}: lora_alpha: got {repr(alpha)[:50]}, allowed is a number of at most {_MAX_SCALE:g}"
        )
    return rank, alpha / (math.sqrt(rank) if is_stabilized else rank)


def _widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return ``E`` and ``O`` of each module that may have an adapter, in the order of its layer's slices."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_size for n in (config.num_attention_heads, config.num_kv_heads))
    return {
        "self_attn.q_proj": (width, heads),
        "self_attn.k_proj": (width, kv_heads),
        "self_attn.v_proj": (width, kv_heads),
        "self_attn.o_proj": (heads, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }


def _expected_tensors(
    config: ModelConfig, rank: int
) -> Iterator[tuple[str, tuple[tuple[int, str], tuple[int, int]]]]:
    """Yield the name of each tensor that an adapter may have, with layer and module, and its shape."""
    for layer in range(config.num_layers):
        for module, (fan_in, fan_out) in _widths(config).items():
            name = f"{_PREFIX}{layer}.{module}"
            yield f"{name}.lora_A.weight", ((layer, module), (rank, fan_in))
            yield f"{name}.lora_B.weight", ((layer, module), (fan_out, rank))


class AdapterSlots:
    """The LoRA slots of a model's layers; zeros until an adapter is loaded.

    Args:
        layers: of a model for which ``why_no_adapters`` finds nothing; each linear layer in it gets its slots.
    """

    def __init__(
        self, layers: list[DecoderLayer], config: ModelConfig, num_slots: int, max_rank: int
    ) -> None:
        self.num_slots, self._max_rank, self._config = num_slots, max_rank, config
        # By layer: A [U, Z, E] and B [U, O, Z] of each module.
        self._tensors: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        for index, layer in enumerate(layers):
            tensors = {
                module: (self._zeros(max_rank, fan_in), self._zeros(fan_out, max_rank))
                for module, (fan_in, fan_out) in _widths(config).items()
            }
            self._tensors.append(tensors)
            layers[index] = _with_adapters(layer, list(tensors.values()))

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(each.nbytes for layer in self._tensors for pair in layer.values() for each in pair)

    def check(self, directory: Path) -> None:
        """Do what ``load`` does before it reads weights; errors are those of ``find_adapter``."""
        find_adapter(directory, self._config, self._max_rank)

    @torch.inference_mode()
    def load(self, slot: int, directory: Path) -> None:
        """Copy an adapter into a slot that no request uses or gets meanwhile. Any thread may call it.

        Raises:
            ModelError: see ``find_adapter``; or a weight is no number. The slot may have any content then.
        """
        stored = find_adapter(directory, self._config, self._max_rank)
        with ExitStack() as stack:
            if self._config.device.type == "cuda":
                # What was enqueued for earlier requests of the slot; what is enqueued from now on has none.
                torch.cuda.synchronize(self._config.device)
                copying = torch.cuda.Stream(self._config.device)
                stack.enter_context(torch.cuda.stream(copying))
                stack.callback(copying.synchronize)
            for layer, tensors in enumerate(self._tensors):
                self._load_layer(slot, layer, tensors, stored)

    def _load_layer(
        self,
        slot: int,
        layer: int,
        tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        stored: StoredAdapter,
    ) -> None:
        copies: list[Copy] = []
        read: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in tensors:
            if (pair := stored.pairs.get((layer, module))) is not None:
                read[module] = torch.empty(pair[0].shape), torch.empty(pair[1].shape)
                copies += map(Copy, pair, read[module])
        if copies:
            stream(copies)
        for module, (into_a, into_b) in tensors.items():
            into_a[slot].zero_()
            into_b[slot].zero_()
            if module not in read:
                continue
            a, b = read[module]
            for own, part, source in (
                (into_a[slot, : stored.rank], a, stored.pairs[layer, module][0]),
                (into_b[slot, :, : stored.rank], b.mul_(stored.scale), stored.pairs[layer, module][1]),
            ):
                rounded = part.to(own.dtype)
                if not rounded.isfinite().all():
                    raise ModelError(f"model: tensor {source.name!r} has weights that are not finite numbers")
                own.copy_(rounded)

    def _zeros(self, *shape: int) -> torch.Tensor:
        size = (self.num_slots, *shape)
        return torch.zeros(size, dtype=self._config.dtype, device=self._config.device)


def _with_adapters(layer: DecoderLayer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DecoderLayer:
    """Return a layer whose linear layers have the slots of ``pairs``, in the order of ``_widths``."""
    assert isinstance(layer.mlp, Mlp), "experts have no adapters"
    lora_a, lora_b = ([pair[index] for pair in pairs] for index in (0, 1))
    qkv, out, gate_up, down = (
        Adapters(tuple(lora_a[part]), tuple(lora_b[part]))
        for part in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
    )
    return replace(
        layer,
        qkv=replace(layer.qkv, adapters=qkv),
        attn_out=replace(layer.attn_out, adapters=out),
        mlp=Mlp(replace(layer.mlp.gate_up, adapters=gate_up), replace(layer.mlp.down, adapters=down)),
    )


def why_no_adapters(config: ModelConfig) -> str | None:
    """Return why a model's layers cannot have adapters; None if they can."""
    if not config.gated_mlp:
        return "an MLP without a gate"
    return None if config.experts is None else "experts"
