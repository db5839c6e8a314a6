"""Prometheus metrics: names and meaning are vLLM's, the prefix is ``rose:``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose_backend.server.engine_messages import Counters

if TYPE_CHECKING:
    from rose_backend.server.service import Engine

_LABELS = ["model_name"]
_TTFT_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.25,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
_TOKEN_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
FINISH_REASONS = ("stop", "length", "abort")


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model_name: value of the label ``model_name``.
        exact_cached_tokens: count every token that was found in the prefix cache.
    """

    def __init__(self, engine: Engine, model_name: str, *, exact_cached_tokens: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(engine, model_name, exact_cached_tokens)
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
        success = Counter(
            "rose:request_success",
            "Completions that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self._registry,
        )
        self.request_success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}
        self._responses = Counter(
            "rose:http_responses",
            "Answers by route and status; 499: the client left first.",
            ["route", "status"],
            registry=self._registry,
        )

    def count_response(self, route: str, status: int) -> None:
        """Count one answer."""
        self._responses.labels(route, str(status)).inc()

    def render(self, counters: Counters) -> bytes:
        """Return everything in Prometheus' text format.

        Args:
            counters: what the engine says now.
        """
        self._engine.counters = counters
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"rose:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        # Looked up once: labels() costs more than an observation.
        return family.labels(self._model_name)


class _EngineCollector(Collector):
    """What the engine counts itself. Shows nothing of that before ``counters`` is set."""

    def __init__(self, engine: Engine, model_name: str, exact_cached_tokens: bool) -> None:
        self._engine = engine
        self._model_name = model_name
        self._exact_cached_tokens = exact_cached_tokens
        self.counters: Counters | None = None

    def collect(self) -> Iterable[Metric]:
        yield self._cache_config()
        if self.counters is None:
            return
        stats, load = self.counters
        yield self._gauge("num_requests_running", "Sequences that hold a row.", load.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one.", load.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", load.kv_cache_usage
        )
        yield self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        hits = stats.prefix_cache_hits if self._exact_cached_tokens else stats.reported_prefix_cache_hits
        yield self._counter("prefix_cache_hits", "Tokens found there.", hits)
        yield self._counter(
            "num_preemptions", "Sequences that lost their row for a while.", stats.preemptions
        )
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)

    def _cache_config(self) -> Metric:
        config = {
            "block_size": str(self._engine.config.block_size),
            "num_gpu_blocks": str(self._engine.num_blocks),
            "model_name": self._model_name,
        }
        family = GaugeMetricFamily("rose:cache_config_info", "The KV pool, as labels.", labels=list(config))
        family.add_metric(list(config.values()), 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"rose:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"rose:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name], value)
        return family
