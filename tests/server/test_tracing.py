"""Spans of prompts, as a collector gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from vllm.tracing import SpanAttributes

from rose_backend.errors import ConfigError
from rose_backend.server import tracing
from rose_backend.server.settings import ServerSettings
from tests.server.live_server import GREEDY, running_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "http/protobuf")
    found = Collector()
    yield found
    found.close()


def values_of(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.parametrize("frontend_multiprocessing", [False, True])
def test_each_prompt_has_a_span(
    tiny_model_path: Path, collector: Collector, frontend_multiprocessing: bool
) -> None:
    begin_ns = time.time_ns()
    settings = {
        "otlp_traces_endpoint": collector.endpoint,
        "frontend_multiprocessing": frontend_multiprocessing,
    }
    with running_server(tiny_model_path, settings) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {"model": "tiny", "prompt": [[70, 71, 72], [80, 81]], "max_tokens": 5, "ignore_eos": True}
        sampled = {"temperature": 0.5, "top_p": 0.9, "n": 2}
        answer = server.http.post("/v1/completions", json=body | sampled, headers=headers)
        assert answer.status_code == 200
        assert server.complete(**GREEDY, prompt=[70]).status_code == 200
        # Refused: nothing was computed.
        assert server.complete(prompt=[70], max_tokens=-1).status_code == 400
    # The server sends what is left as it ends.
    assert [span.name for span in collector.spans] == ["llm_request"] * 3
    *of_two, alone = sorted(collector.spans, key=lambda span: span.end_time_unix_nano)
    for span in of_two:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert (
            values_of(span).items()
            >= {
                SpanAttributes.GEN_AI_REQUEST_ID: "mine",
                SpanAttributes.GEN_AI_REQUEST_N: 2,
                SpanAttributes.GEN_AI_REQUEST_MAX_TOKENS: 5,
                SpanAttributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
                SpanAttributes.GEN_AI_REQUEST_TOP_P: 0.9,
                SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: 10,
            }.items()
        )
    assert sorted(values_of(span)[SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS] for span in of_two) == [2, 3]
    values, latency = values_of(alone), "gen_ai.latency."
    assert alone.parent_span_id == b"" and SpanAttributes.GEN_AI_REQUEST_TEMPERATURE not in values
    times = {name: value for name, value in values.items() if name.startswith(latency)}
    assert times.keys() == {
        SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN,
        SpanAttributes.GEN_AI_LATENCY_E2E,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE,
    }
    e2e = times[SpanAttributes.GEN_AI_LATENCY_E2E]
    assert all(0 <= value <= e2e for value in times.values())
    # To a millisecond: the clocks are of different kinds.
    assert (
        begin_ns - 10**6 <= alone.start_time_unix_nano <= alone.end_time_unix_nano <= time.time_ns() + 10**6
    )
    assert alone.end_time_unix_nano - alone.start_time_unix_nano >= e2e * 0.99 * 10**9


def test_without_an_endpoint_there_are_none(
    tiny_model_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
    with running_server(tiny_model_path, {}) as server:
        assert server.complete(prompt=[70], max_tokens=1).status_code == 200
        assert server.service.tracing is None
    assert collector.spans == []


@pytest.mark.parametrize("header", ["00-zz-zz-01", "", "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "x" * 5000])
def test_a_header_that_names_no_span_is_ignored(
    tiny_model_path: Path, collector: Collector, header: str
) -> None:
    with running_server(tiny_model_path, {"otlp_traces_endpoint": collector.endpoint}) as server:
        body = {"model": "tiny", "prompt": [70], "max_tokens": 1}
        headers = {"traceparent": header, "tracestate": "=,=" * 50}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert [span.parent_span_id for span in collector.spans] == [b""]


@pytest.mark.parametrize("protocol", tracing.PROTOCOLS)
def test_a_collector_that_does_not_answer_holds_nothing_up(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, protocol)
    monkeypatch.setattr(tracing, "_MAX_END_S", 0.1)
    with running_server(tiny_model_path, {"otlp_traces_endpoint": "http://127.0.0.1:9"}) as server:
        for _ in range(20):
            assert server.complete(prompt=[70], max_tokens=1).status_code == 200


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: got ''"):
        ServerSettings(served_model_names=("tiny",), otlp_traces_endpoint="")
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "http/json")
    with pytest.raises(ConfigError, match=r"PROTOCOL: got 'http/json', allowed are grpc, http/protobuf"):
        ServerSettings(served_model_names=("tiny",), otlp_traces_endpoint="http://localhost:4317")
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs opentelemetry.sdk, which is not installed.*\[tracing\]"):
        ServerSettings(served_model_names=("tiny",), otlp_traces_endpoint="http://localhost:4317")
