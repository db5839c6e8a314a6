"""Reads the KV cache metrics of an engine's Prometheus endpoint: vLLM's names, or those of `rose serve`."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rose_backend.errors import ConfigError, MetricsError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

TIMEOUT_S = 5.0
_MAX_BYTES = 32 << 20
_USAGE = "vllm:kv_cache_usage_perc"
_ROSE_USAGE = "rose:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of an engine. Counters count since its start; several engines behind one address are added up.

    A value that is not served is None.
    """

    time_s: float
    """``time.monotonic`` at the answer."""
    usage: float
    """Share of the pool that requests hold, 0 to 1; the mean over the engines."""
    rose_usage: float | None
    """The same as Rose's block manager counts it, where both are served."""
    num_engines: int
    model: str
    num_blocks: int | None
    """KV blocks of all engines, without each engine's null block."""
    block_size: int | None
    running: float | None
    waiting: float | None
    query_tokens: float | None
    hit_tokens: float | None
    preemptions: float | None
    prompt_tokens: float | None
    generation_tokens: float | None


def metrics_url(url: str) -> str:
    """Return the address to ask.

    Args:
        url: server's address, with or without ``/metrics``.

    Raises:
        ConfigError: not an http or https address.
    """
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http or any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(f"url: got {url!r}, allowed is http://HOST:PORT or https://HOST:PORT")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics", fragment="").geturl()


def read_metrics(url: str) -> Reading:
    """Ask once.

    Args:
        url: answer of ``metrics_url``.

    Raises:
        MetricsError: no answer, or one without KV cache metrics; the message is one line.
    """
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            body = answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        raise MetricsError(
            f"{url}: answered {error.code} {error.reason}; is this an engine's address?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise MetricsError(f"{url}: no answer ({' '.join(str(text).split())})") from error
    return parse_metrics(body.decode("utf-8", errors="replace"), url, time.monotonic())


def parse_metrics(text: str, url: str, time_s: float) -> Reading:
    """Read Prometheus' text format.

    Args:
        text: the answer's body.
        url: for errors.
        time_s: when it came.

    Raises:
        MetricsError: prometheus_client is missing, or the text has no vLLM KV-cache metrics.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise MetricsError(
            "url: needs prometheus_client, which is not installed; pip install 'WHEEL[serve]' brings it"
        ) from error
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append(sample)
    except ValueError as error:
        raise MetricsError(f"{url}: answered, but not with Prometheus metrics") from error
    return _read_samples(samples, url, time_s)


def _read_samples(samples: Mapping[str, Sequence[Sample]], url: str, time_s: float) -> Reading:
    def find(name: str) -> Sequence[Sample]:
        return samples.get(f"vllm:{name}") or samples.get(f"rose:{name}") or ()

    def total(name: str) -> float | None:
        found = find(name)
        return sum(sample.value for sample in found) if found else None

    def config(label: str) -> list[int]:
        # A label that is not known yet reads "None".
        texts = [sample.labels.get(label, "") for sample in find("cache_config_info")]
        return [int(text) for text in texts if text.isdecimal()]

    usages = samples.get(_USAGE) or samples.get(_ROSE_USAGE)
    if usages is None:
        raise MetricsError(
            f"{url}: answered with metrics, but not with {_USAGE}; is this an engine's address?"
        )
    rose_usages = samples.get(_ROSE_USAGE) if _USAGE in samples else None
    block_counts, block_sizes = config("num_gpu_blocks"), set(config("block_size"))
    return Reading(
        time_s=time_s,
        usage=_mean(usages),
        rose_usage=_mean(rose_usages) if rose_usages else None,
        num_engines=len(usages),
        model=", ".join(sorted({sample.labels.get("model_name", "") for sample in usages} - {""})),
        num_blocks=sum(count - 1 for count in block_counts) if block_counts else None,
        block_size=block_sizes.pop() if len(block_sizes) == 1 else None,
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        query_tokens=total("prefix_cache_queries_total"),
        hit_tokens=total("prefix_cache_hits_total"),
        preemptions=total("num_preemptions_total"),
        prompt_tokens=total("prompt_tokens_total"),
        generation_tokens=total("generation_tokens_total"),
    )


def _mean(samples: Sequence[Sample]) -> float:
    return float(sum(sample.value for sample in samples) / len(samples))
