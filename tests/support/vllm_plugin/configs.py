"""What several suites of the plug-in ask of a vLLM configuration, and how they read the start-up line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig

MakeConfig = Callable[..., Any]
OnGpu = Callable[..., Any]
LoadModel = Callable[..., Any]
VLLM_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
WINDOWS = {"hf_overrides": {"sliding_window": 64}}
MIXED_WINDOWS = {
    "hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
}


def rose(**options: Any) -> dict[str, Any]:
    """Return the engine argument with these options of Rose."""
    return {"additional_config": {"rose": options}}


def n_grams(num_tokens: int = 2, method: str = "ngram") -> dict[str, Any]:
    """Return the configuration of a drafter that looks drafts up."""
    return {"method": method, "num_speculative_tokens": num_tokens, "prompt_lookup_max": 3}


def connector(name: str, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the engine argument with a KV connector."""
    # Not a random id: tests are named after what they are given.
    options = {"kv_role": "kv_both", "engine_id": "engine", **options}
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=name, kv_connector_extra_config=extra or {}, **options
        )
    }


def idle_parts(line: str) -> dict[str, str]:
    """Return the switches that a start-up line says are unavailable, with the reasons."""
    said = line.partition("; unavailable: ")[2]
    groups = re.findall(r"([a-z0-9_ ]+) \(([^)]*)\)", said)
    return {name: reason for names, reason in groups for name in names.strip().split(" and ")}
