"""Reads ``quantization_config`` of config.json, for checkpoints with weights in 8 or 4 bits. (Inside vLLM, vLLM does.)

Float8 formats differ only in how scales are stored: in all of them the weight is an e4m3 number times its scale. How
int4 formats pack codes is in ``rose_backend.kernels.linear.int4_formats``. Which matrices are quantized follows from
the tensors in the checkpoint (``models/streaming.py``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rose_backend.errors import ModelError
from rose_backend.kernels.arguments import INT4_GROUPS
from rose_backend.kernels.linear.int4_formats import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2, Int4Format

_BLOCK = [128, 128]
UNUSED_SUFFIXES = (
    *(".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
    ".weight_shape",
)
"""Tensors that are not read: scales of activations, which are computed instead; scales of K/V caches, under old and new
names; shapes, which are known."""
_FIELD = "config.json: quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantization:
    """How matrices of a checkpoint are quantized."""

    ignored: tuple[str, ...] = ()
    """Names or patterns of modules that are not quantized."""

    def ignores(self, module: str) -> bool:
        """Whether config.json says that a module is not quantized."""
        return any(_matches(pattern, module) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Float8Quantization(_Quantization):
    """How float8 matrices of a checkpoint are scaled."""

    scales: Literal["blocks", "rows", "tensor"]
    """What has one scale: a block of 128 x 128, an output row, or the whole matrix."""
    scale_name: str
    """Name of the tensor of scales, beside ``weight``."""


@dataclass(frozen=True, slots=True)
class Int4Quantization(_Quantization):
    """How int4 matrices of a checkpoint are stored."""

    form: Int4Format
    group_size: int | None
    """Columns that share a scale; None: all of a row's."""
    has_zeros: bool


Quantization = Float8Quantization | Int4Quantization


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatch.fnmatchcase(module, pattern) or f".{module}.".find(f".{pattern}.") >= 0


def read_quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """Return how weights are quantized; None if they are not.

    Args:
        fields: the fields of config.json.

    Raises:
        ModelError: they are quantized in an unsupported way; the message names the field and the supported values.
    """
    config = fields.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{_FIELD} must be an object, got {config!r}")
    method = config.get("quant_method")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
        "awq": _read_awq,
        "gptq": _read_gptq,
    }
    if not isinstance(method, str) or method not in readers:
        raise ModelError(
            f"{_FIELD}.quant_method={method!r} is not supported, allowed are {', '.join(readers)}; "
            "vLLM with Rose inside serves others"
        )
    return readers[method](config)


def _read_fp8(config: Mapping[str, Any]) -> Quantization:
    """Read the format of Qwen's and DeepSeek's checkpoints, and of AutoFP8's."""
    _require("", config, "fmt", "e4m3", None)
    block = config.get("weight_block_size")
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    if block is None:
        return Float8Quantization("tensor", "weight_scale", ignored=ignored)
    _require("", config, "weight_block_size", _BLOCK)
    return Float8Quantization("blocks", "weight_scale_inv", ignored=ignored)


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _require("", config, "format", "float-quantized", "pack-quantized")
    for name in ("sparsity_config", "transform_config"):
        if config.get(name):
            raise ModelError(f"{_FIELD}.{name} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ModelError(f"{_FIELD}.config_groups must have one group, got {groups!r}")
    ((name, group),) = groups.items()
    path, weights = (
        f".config_groups.{name}.weights",
        group.get("weights") if isinstance(group, dict) else None,
    )
    if not isinstance(weights, dict):
        raise ModelError(f"{_FIELD}{path} must be an object, got {weights!r}")
    ignored = _names(config, "ignore")
    if config["format"] == "pack-quantized":
        return _read_packed(path, weights, ignored)
    _require(path, weights, "num_bits", 8)
    _require(path, weights, "type", "float")
    _require(path, weights, "symmetric", True, None)
    _require(path, weights, "dynamic", False, None)
    _require(path, weights, "strategy", "channel", "tensor", "block")
    if weights["strategy"] == "block":
        _require(path, weights, "block_structure", _BLOCK)
        return Float8Quantization("blocks", "weight_scale", ignored=ignored)
    scales: Literal["rows", "tensor"] = "rows" if weights["strategy"] == "channel" else "tensor"
    return Float8Quantization(scales, "weight_scale", ignored=ignored)


def _read_packed(path: str, weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Int4Quantization:
    _require(path, weights, "num_bits", 4)
    _require(path, weights, "type", "int", None)
    _require(path, weights, "symmetric", True, False, None)
    _require(path, weights, "dynamic", False, None)
    # With other values, the columns of a group are not adjacent.
    _require(path, weights, "actorder", None, False, "weight", "static")
    _require(path, weights, "strategy", "group", "channel")
    has_zeros = weights.get("symmetric") is False
    if weights["strategy"] == "channel":
        return Int4Quantization(COMPRESSED_TENSORS, None, has_zeros, ignored=ignored)
    _require(path, weights, "group_size", *INT4_GROUPS)
    return Int4Quantization(COMPRESSED_TENSORS, weights["group_size"], has_zeros, ignored=ignored)


def _read_modelopt(config: Mapping[str, Any]) -> Quantization:
    _require("", config, "quant_algo", "FP8")
    return Float8Quantization("tensor", "weight_scale", ignored=_names(config, "ignore", "exclude_modules"))


def _read_awq(config: Mapping[str, Any]) -> Int4Quantization:
    _require("", config, "bits", 4)
    _require("", config, "zero_point", True)
    _require("", config, "version", "gemm", "GEMM", None)
    return Int4Quantization(AWQ, _group_size(config), True, ignored=_names(config, "modules_to_not_convert"))


def _read_gptq(config: Mapping[str, Any]) -> Int4Quantization:
    _require("", config, "bits", 4)
    for name in ("dynamic", "lm_head"):
        if config.get(name):
            raise ModelError(f"{_FIELD}.{name} is not supported")
    _require("", config, "checkpoint_format", "gptq", "gptq_v2", None)
    group_size = _group_size(config)
    if group_size is not None:
        # The columns of a group would not be adjacent.
        _require("", config, "desc_act", False, None)
    form = GPTQ_V2 if config.get("checkpoint_format") == "gptq_v2" else GPTQ
    return Int4Quantization(form, group_size, config.get("sym") is not True)


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return how many columns share a scale; None: all of a row's."""
    _require("", config, "group_size", *INT4_GROUPS, -1)
    return None if config["group_size"] == -1 else config["group_size"]


def _require(path: str, fields: Mapping[str, Any], name: str, *allowed: Any) -> None:
    value = fields.get(name)
    if value not in allowed:
        listed = ", ".join("null" if each is None else str(each) for each in allowed)
        raise ModelError(f"{_FIELD}{path}.{name}={value!r} is not supported, allowed are {listed}")


def _names(fields: Mapping[str, Any], *places: str) -> tuple[str, ...]:
    """Return the list of names in the first of the fields ``places`` that is there; empty if none is."""
    for place in places:
        names = fields.get(place)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ModelError(f"{_FIELD}.{place} must be a list of names, got {names!r}")
        return tuple(names)
    return ()
