"""A span for each prompt, sent to an OpenTelemetry collector. Names of spans and attributes are vLLM's.

Its parent is the span that a client or proxy names in the headers ``traceparent`` and ``tracestate``. A thread sends
spans; what a collector does not take in time is dropped.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from rose_backend.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's own; as in vLLM, without it the protocol is the first of ``PROTOCOLS``."""
PROTOCOLS = ("grpc", "http/protobuf")
_HEADERS = ("traceparent", "tracestate")
_MAX_END_S = 3.0
"""How long a server that ends waits for its last spans to be sent."""


def check_tracing(endpoint: str) -> None:
    """Check that spans can be sent to a collector at this address.

    Raises:
        ConfigError: it is empty, OpenTelemetry is not installed, or the protocol is unknown.
    """
    if not endpoint:
        raise ConfigError("otlp_traces_endpoint: got '', allowed is the address of a collector")
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp"):
        try:
            is_installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_installed = False
        if not is_installed:
            raise ConfigError(
                f"otlp_traces_endpoint: needs {module}, which is not installed; pip install 'WHEEL[tracing]' brings it"
            )
    if (protocol := _protocol()) not in PROTOCOLS:
        raise ConfigError(f"{PROTOCOL_VARIABLE}: got {protocol!r}, allowed are {', '.join(PROTOCOLS)}")


def _protocol() -> str:
    return os.environ.get(PROTOCOL_VARIABLE, PROTOCOLS[0])


class Tracing:
    """Sends spans until it is closed.

    Args:
        endpoint: address of the collector, checked by ``check_tracing``.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say more.
        self._provider = TracerProvider(resource=Resource.create(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("rose_backend")
        self._kind, self._propagator = SpanKind.SERVER, TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def note_prompt(self, headers: Mapping[str, str], start_s: float, attributes: Mapping[str, Any]) -> None:
        """Send the span of a prompt whose last token has just been made.

        Args:
            headers: from ``trace_headers``.
            start_s: ``time.monotonic`` when the request arrived.
            attributes: values of None are left out.
        """
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers) if headers else None,
            kind=self._kind,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=self._epoch_ns + int(start_s * 1e9),
        )
        span.end()

    def close(self) -> None:
        """Send what is left, for at most ``_MAX_END_S``."""
        # A collector that does not answer is asked again and again.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_MAX_END_S)


def trace_headers(headers: Headers) -> dict[str, str]:
    """Return what a request says about the span that it belongs to."""
    return {name: headers[name] for name in _HEADERS if name in headers}


def _make_exporter(endpoint: str) -> SpanExporter:
    exporter: SpanExporter
    if _protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter(endpoint=endpoint, insecure=True)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter(endpoint=endpoint)
    return exporter
