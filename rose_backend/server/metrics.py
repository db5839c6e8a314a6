"""Prometheus metrics: vLLM's names and meaning, prefix ``rose:``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose_backend.engine.engine_stats import Counters

_LABELS = ["model_name"]
# fmt: off
_TTFT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80
)
# fmt: on
_TOKEN_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_COUNT_STEPS = (1, 2, 5)
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """All metrics of one server, in a separate registry.

    Args:
        block_size: of the KV cache, in tokens.
        num_blocks: of the KV cache, the null block included.
        max_model_len: prompt plus output, in tokens; the last bucket of numbers of tokens.
        exact_cached_tokens: count every token that was found in the prefix cache.
    """

    def __init__(
        self,
        model_name: str,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        exact_cached_tokens: bool = False,
    ) -> None:
        self._registry = CollectorRegistry()
        cache_config = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "model_name": model_name,
        }
        self._engine = _EngineCollector(cache_config, exact_cached_tokens)
        self._registry.register(self._engine)
        self._model_name = model_name
        self.prompt_tokens = Counter(
            "rose:prompt_tokens",
            "Prompt tokens of requests that got a first token.",
            _LABELS,
            registry=self._registry,
        ).labels(model_name)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two deliveries of tokens to a prompt.", _TOKEN_BUCKETS_S
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a prompt's later tokens.", _TOKEN_BUCKETS_S
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its last token.", _REQUEST_BUCKETS_S
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "From a prompt's submission to its first step.", _REQUEST_BUCKETS_S
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "From a prompt's first step to its first token.",
            _REQUEST_BUCKETS_S,
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "From a prompt's first token to its last.", _REQUEST_BUCKETS_S
        )
        token_buckets = _token_count_buckets(max_model_len)
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", token_buckets
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a completion.", token_buckets
        )
        self.request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a prompt's longest completion.", token_buckets
        )
        success = Counter(
            "rose:request_success",
            "Completions that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self._registry,
        )
        self.request_success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}
        self.responses = Counter(
            "rose:http_responses",
            "Answers by route and status; 499: the client left first.",
            ["route", "status"],
            registry=self._registry,
        )

    def render(self, counters: Counters) -> bytes:
        """Return everything in Prometheus' text format; ``counters`` are the engine's present ones."""
        self._engine.counters = counters
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"rose:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        # Looked up once: labels() costs more than an observation.
        return family.labels(self._model_name)


def _token_count_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, at most ``max_model_len``."""
    powers = (10**exponent for exponent in range(len(str(max_model_len))))
    buckets = (step * power for power in powers for step in _TOKEN_COUNT_STEPS)
    return tuple(float(bucket) for bucket in buckets if bucket <= max_model_len)


class _EngineCollector(Collector):
    """The engine's own counters. Only the cache configuration is exported before ``counters`` is set."""

    def __init__(self, cache_config: dict[str, str], exact_cached_tokens: bool) -> None:
        self._cache_config = cache_config
        self._model_name = cache_config["model_name"]
        self._exact_cached_tokens = exact_cached_tokens
        self.counters: Counters | None = None

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(
            "rose:cache_config_info", "The KV pool, as labels.", labels=list(self._cache_config)
        )
        info.add_metric(list(self._cache_config.values()), 1.0)
        yield info
        if self.counters is None:
            return
        stats, load = self.counters
        gauge, counter = partial(self._metric, GaugeMetricFamily), partial(self._metric, CounterMetricFamily)
        yield gauge("num_requests_running", "Sequences that hold a row.", load.num_running)
        yield gauge("num_requests_waiting", "Requests that wait for one.", load.num_waiting)
        yield gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", load.kv_cache_usage)
        yield counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        hits = stats.prefix_cache_hits if self._exact_cached_tokens else stats.reported_prefix_cache_hits
        yield counter("prefix_cache_hits", "Tokens found there.", hits)
        yield counter("num_preemptions", "Sequences that lost their row for a while.", stats.preemptions)
        yield counter("generation_tokens", "Tokens generated.", stats.generated_tokens)

    def _metric(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(f"rose:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name], value)
        return family
