"""What all routes of a running server share: engine, prefix-cache namespaces, settings, metrics, log line."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers

from rose_backend import __version__
from rose_backend.block_manager import reporting_unit
from rose_backend.engine.client import EngineClient
from rose_backend.engine.outputs import Counters
from rose_backend.engine.request import check_cache_salt, sampling_defaults
from rose_backend.server.adapters import ServedAdapter, ServedAdapters
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.settings import ServerSettings
from rose_backend.server.tracing import Tracing

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("rose_backend.server.requests")
_MAX_ERROR_CHARACTERS = 300

_LABELS = ["model_name"]
# fmt: off
_TTFT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80
)
# fmt: on
_TOKEN_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_COUNT_STEPS = (1, 2, 5)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", _TTFT_BUCKETS_S),
    "inter_token_latency_seconds": ("Between two deliveries of tokens to a prompt.", _TOKEN_BUCKETS_S),
    "request_time_per_output_token_seconds": ("Mean time of a prompt's later tokens.", _TOKEN_BUCKETS_S),
    "e2e_request_latency_seconds": ("From the request's arrival to its last token.", _REQUEST_BUCKETS_S),
    "request_queue_time_seconds": ("From a prompt's submission to its first step.", _REQUEST_BUCKETS_S),
    "request_prefill_time_seconds": ("From a prompt's first step to its first token.", _REQUEST_BUCKETS_S),
    "request_decode_time_seconds": ("From a prompt's first token to its last.", _REQUEST_BUCKETS_S),
    "request_prompt_tokens": ("Tokens of a prompt.", None),
    "request_generation_tokens": ("Tokens of a completion.", None),
    "request_max_num_generation_tokens": ("Tokens of a prompt's longest completion.", None),
}
"""By name: what they show, and their buckets; None: up to the model's window."""
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics(Collector):
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
        self._model_name = model_name
        self._exact_cached_tokens = exact_cached_tokens
        self._counters: Counters | None = None
        self._cache_config = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "model_name": model_name,
        }
        self._registry.register(self)
        self.prompt_tokens = Counter(
            "rose:prompt_tokens",
            "Prompt tokens of requests that got a first token.",
            _LABELS,
            registry=self._registry,
        ).labels(model_name)
        token_buckets = _token_count_buckets(max_model_len)
        self.histograms = {
            # Labels are looked up once: that costs more than an observation.
            name: Histogram(
                f"rose:{name}", text, _LABELS, buckets=buckets or token_buckets, registry=self._registry
            ).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
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
        self._counters = counters
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield what the engine counts; before the first ``render``, only the configuration of its cache."""
        info = GaugeMetricFamily(
            "rose:cache_config_info", "The KV pool, as labels.", labels=list(self._cache_config)
        )
        info.add_metric(list(self._cache_config.values()), 1.0)
        yield info
        if self._counters is None:
            return
        stats, load = self._counters
        hits = stats.prefix_cache_hits if self._exact_cached_tokens else stats.reported_prefix_cache_hits
        gauges = (
            ("num_requests_running", "Sequences that hold a row.", load.num_running),
            ("num_requests_waiting", "Requests that wait for one.", load.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", load.kv_cache_usage),
        )
        counters: tuple[tuple[str, str, float], ...] = (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found there.", hits),
            ("num_preemptions", "Running sequences that were preempted.", stats.preemptions),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
        )
        if stats.spec_decode_num_accepted_tokens_per_pos:
            counters += (
                ("spec_decode_num_drafts", "Times that a sequence had drafts.", stats.spec_decode_num_drafts),
                ("spec_decode_num_draft_tokens", "Draft tokens.", stats.spec_decode_num_draft_tokens),
                ("spec_decode_num_accepted_tokens", "Those accepted.", stats.spec_decode_num_accepted_tokens),
            )
            yield self._accepted_by_position(stats.spec_decode_num_accepted_tokens_per_pos)
        for family, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in numbers:
                metric = family(f"rose:{name}", text, labels=_LABELS)
                metric.add_metric([self._model_name], value)
                yield metric

    def _accepted_by_position(self, numbers: tuple[int, ...]) -> Metric:
        metric = CounterMetricFamily(
            "rose:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their place after the newest token.",
            labels=[*_LABELS, "position"],
        )
        for position, number in enumerate(numbers):
            metric.add_metric([self._model_name, str(position)], number)
        return metric


def _token_count_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, at most ``max_model_len``."""
    powers = (10**exponent for exponent in range(len(str(max_model_len))))
    buckets = (step * power for power in powers for step in _TOKEN_COUNT_STEPS)
    return tuple(float(bucket) for bucket in buckets if bucket <= max_model_len)


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, as its log line and the metrics describe it. Filled in while the server handles it."""

    request_id: str
    route: str
    start_s: float = field(default_factory=time.monotonic)
    status: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of each prompt whole multiples of ``Service.hit_unit``."""
    num_output_tokens: int = 0
    first_token_s: float | None = None
    """``time.monotonic`` when the first token came back from the engine."""
    finish_reasons: set[str] = field(default_factory=set)
    error: str | None = None
    """Why the request was refused, or could not be completed."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Of a server with tracing, what the client says about the span that the request belongs to."""
    adapter: ServedAdapter | None = None
    """Of all prompts; held until the request ends."""

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, as OpenAI's object; a prompt with several completions counts once."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def log(self) -> None:
        """Write the line: ``name=value`` pairs, tokens only of requests that had one generated."""
        parts = [f"id={self.request_id}", f"route={self.route}", f"status={self.status}"]
        if self.first_token_s is not None:
            parts += [
                f"prompt_tokens={self.num_prompt_tokens}",
                f"cached_tokens={self.num_cached_tokens}",
                f"output_tokens={self.num_output_tokens}",
                f"ttft_ms={(self.first_token_s - self.start_s) * 1e3:.1f}",
            ]
        parts.append(f"latency_ms={(time.monotonic() - self.start_s) * 1e3:.1f}")
        if self.finish_reasons:
            parts.append(f"finish={','.join(sorted(self.finish_reasons))}")
        if self.error is not None:
            parts.append(f"error={self.error[:_MAX_ERROR_CHARACTERS]!r}")
        request_logger.info(" ".join(parts))


def given_key(headers: Headers) -> str:
    """Return the API key of a request: a bearer token or, as Anthropic's clients send it, ``X-Api-Key``; empty: none.

    Which key a request has is decided here alone: it says both who may use the server and which prefix cache they get.
    """
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key", "")
    scheme, _, token = authorization.partition(" ")
    return token if scheme.lower() == "bearer" else ""


class CacheNamespaces:
    """Gives each API key a prefix cache that no other key can read, with any ``cache_salt``.

    A namespace is a digest under a secret of this process: neither key nor salt can be derived from it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._has_keys = bool(settings.api_keys)
        self._is_per_key = self._has_keys and not settings.share_prefix_cache
        self._secret = secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    def namespace(self, headers: Headers, cache_salt: str | None) -> bytes:
        """Return the prefix cache of a request; empty for the one that all requests without a salt share.

        Args:
            headers: of a request that has been authorized.
            cache_salt: the request's own; with the same key, only requests with the same salt share prefixes.

        Raises:
            RequestError: see ``check_cache_salt``.
        """
        check_cache_salt(cache_salt)
        key = given_key(headers).encode() if self._is_per_key else b""
        if not key and cache_salt is None:
            return b""
        salt = b"" if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
        return self._digest(key, salt)

    def tenant(self, headers: Headers) -> bytes:
        """Return who waits for slots beside the holders of other keys; empty where the server has no keys.

        Args:
            headers: of a request that has been authorized.
        """
        return self._digest(given_key(headers).encode(), b"") if self._has_keys else b""

    def _digest(self, key: bytes, salt: bytes) -> bytes:
        # With its length in front, no key and salt read like another key and salt. A salt is never empty.
        message = len(key).to_bytes(8, "little") + key + salt
        return blake2b(message, key=self._secret, digest_size=32).digest()


class Service:
    """An engine with the server's settings, metrics and unfinished requests. Belongs to the event loop's thread."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, chat_template: ChatTemplate) -> None:
        self.engine = engine
        self.settings = settings
        self.chat_template = chat_template
        self.sampling_defaults = sampling_defaults(engine.config)
        """Of requests that do not say. A limit of answers counts in conversations only, as in vLLM."""
        if self.sampling_defaults.fields or self.sampling_defaults.max_new_tokens is not None:
            logger.info(
                "sampling parameters that requests leave open are those of generation_config.json, %s; "
                "--generation-config none takes the API's",
                self.sampling_defaults,
            )
        self.model_name = settings.served_model_names[0]
        """The name that responses carry."""
        self.metrics = ServerMetrics(
            self.model_name,
            block_size=engine.config.block_size,
            num_blocks=engine.num_blocks,
            max_model_len=engine.input_processor.max_model_len,
            exact_cached_tokens=settings.exact_cached_tokens,
        )
        self.adapters = ServedAdapters(engine, settings)
        self.namespaces = CacheNamespaces(settings)
        endpoint = settings.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self.hit_unit = 1 if settings.exact_cached_tokens else reporting_unit(engine.config.block_size)
        """Numbers of cached tokens are reported in multiples of this."""
        configuration = blake2b(repr(engine.config).encode(), digest_size=4).hexdigest()
        self.fingerprint = f"rose-{__version__}-{configuration}"
        """The same for servers of one version and configuration."""
        self.start_time_s = int(time.time())
        self.is_draining = False
        """Set by the first signal to stop: running requests continue, new ones are refused."""
        self.num_active_requests = 0
        """HTTP requests to routes that generate."""
        self.engine_request_ids: set[str] = set()
        """Unfinished requests inside the engine."""
        self.submission = asyncio.Lock()
        """Held while a request with several prompts submits them."""
        self.long_truncation = asyncio.Semaphore(1)
        """Held while long texts are tokenized of which only a part is kept: 1 MB takes up to 150 MB meanwhile."""

    async def abort_all(self) -> None:
        """Abort every request; each is still answered with the tokens it has."""
        for request_id in tuple(self.engine_request_ids):
            await self.engine.abort(request_id)
