"""What config.json says of weights that are stored in 8 bits.

Only how scales are stored depends on the format: an e4m3 number times its scale is the weight in all of them. Which
matrices are quantized is seen by the types of their tensors.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rose_backend.errors import ModelError

_BLOCK = [128, 128]
UNUSED_SUFFIXES = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
"""Scales of activations, whose own are computed, and of K/V caches, by their older names, too."""
_FIELD = "config.json: quantization_config"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How float8 matrices of a checkpoint are scaled."""

    scales: Literal["blocks", "rows", "tensor"]
    scale_name: str
    """Of the tensor beside ``weight``."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of modules that are not quantized."""

    def ignores(self, module: str) -> bool:
        """Whether config.json says that a module is not quantized."""
        return any(_matches(pattern, module) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatch.fnmatchcase(module, pattern) or f".{module}.".find(f".{pattern}.") >= 0


def read_quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """Return how weights are quantized; None if they are not.

    Args:
        fields: of config.json.

    Raises:
        ModelError: in a way that is not supported; the message names the field, and what is.
    """
    config = fields.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{_FIELD} must be an object, got {config!r}")
    method = config.get("quant_method")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt}
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
        return Quantization("tensor", "weight_scale", ignored)
    _require("", config, "weight_block_size", _BLOCK)
    return Quantization("blocks", "weight_scale_inv", ignored)


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _require("", config, "format", "float-quantized")
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
    _require(path, weights, "num_bits", 8)
    _require(path, weights, "type", "float")
    _require(path, weights, "symmetric", True, None)
    _require(path, weights, "dynamic", False, None)
    _require(path, weights, "strategy", "channel", "tensor", "block")
    ignored = _names(config, "ignore")
    if weights["strategy"] == "block":
        _require(path, weights, "block_structure", _BLOCK)
        return Quantization("blocks", "weight_scale", ignored)
    return Quantization("rows" if weights["strategy"] == "channel" else "tensor", "weight_scale", ignored)


def _read_modelopt(config: Mapping[str, Any]) -> Quantization:
    _require("", config, "quant_algo", "FP8")
    return Quantization("tensor", "weight_scale", _names(config, "ignore", "exclude_modules"))


def _require(path: str, fields: Mapping[str, Any], name: str, *allowed: Any) -> None:
    value = fields.get(name)
    if value not in allowed:
        listed = ", ".join("null" if each is None else str(each) for each in allowed)
        raise ModelError(f"{_FIELD}{path}.{name}={value!r} is not supported, allowed are {listed}")


def _names(fields: Mapping[str, Any], *places: str) -> tuple[str, ...]:
    """Return the names of the first place that there is."""
    for place in places:
        names = fields.get(place)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ModelError(f"{_FIELD}.{place} must be a list of names, got {names!r}")
        return tuple(names)
    return ()
