"""What a vLLM server counts, as it says at /metrics, and the processor time of its processes."""

from __future__ import annotations

import contextlib
import urllib.request
from collections import Counter, defaultdict

import psutil
from prometheus_client.parser import text_string_to_metric_families

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Our names and vLLM's."""


def server_counts(url: str) -> Counter[str]:
    """Return counts since start-up, of all engines of the server together.

    Raises:
        KeyError: the server has no such counter.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as response:
        return parse_counts(response.read().decode())


def parse_counts(text: str) -> Counter[str]:
    """Read a page of /metrics; see ``server_counts``."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += int(sample.value) if sample.name in COUNTERS.values() else 0
    missing = [name for name in COUNTERS.values() if name not in sums]
    if missing:
        raise KeyError(f"the server does not count {', '.join(missing)}")
    return Counter({ours: sums[theirs] for ours, theirs in COUNTERS.items()})


def processor_seconds(pid: int) -> dict[str, float]:
    """Return processor time of a process and all below it, by name; those of one name together."""
    root = psutil.Process(pid)
    seconds: dict[str, float] = defaultdict(float)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process.name()] += times.user + times.system
    return seconds
