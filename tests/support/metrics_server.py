"""A web server that answers like an engine's Prometheus endpoint, and can vanish."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SAMPLE = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="rose-garden"} 0.25
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="rose-garden"} 12.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="rose-garden"} 3.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="rose-garden"} 2000.0
vllm:prefix_cache_queries_created{engine="0",model_name="rose-garden"} 1.79e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="rose-garden"} 1500.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="rose-garden"} 7.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="rose-garden"} 5000.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="rose-garden"} 640.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",num_cpu_blocks="None",num_gpu_blocks="257"} 1.0
"""


class MetricsServer:
    """A web server whose answer at /metrics can be changed, and which can vanish."""

    def __init__(self) -> None:
        self.body, self.status = SAMPLE, 200
        self.num_requests = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.num_requests += 1
                self.send_response(owner.status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(owner.body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def vanish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def values(text: str, **numbers: float) -> str:
    """Return metrics text in which the named metrics have other values."""
    for name, value in numbers.items():
        text, count = re.subn(rf"(?m)^(vllm:{name}\{{.*\}}) .*$", rf"\1 {value}", text)
        assert count
    return text
