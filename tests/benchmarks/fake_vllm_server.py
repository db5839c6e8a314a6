"""Stands in for ``vllm serve``: streams completions at a set pace, and counts a prefix cache that never forgets.

python -m tests.benchmarks.fake_vllm_server PORT BLOCK_SIZE DELAY_MS
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

FAKES = {"rose-in-vllm": ("1", "20"), "vllm": ("16", "60")}
"""Backend -> size of blocks in which prefixes are found, and milliseconds to the first token."""

METRICS = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0"}} {prompt}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {generated}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0"}} 0
"""


class FakeServer:
    """Finds prefixes in whole blocks. The first piece takes ``delay`` seconds, each other one a tenth of it."""

    def __init__(self, block_size: int, delay: float) -> None:
        self._block_size, self._delay = block_size, delay
        self._prompts: list[list[int]] = []
        self._counts = {"prompt": 0, "hits": 0, "generated": 0}

    def _find(self, prompt: list[int]) -> int:
        longest = 0
        for other in self._prompts:
            pairs = enumerate(zip(prompt, other, strict=False))
            longest = max(longest, next((index for index, (a, b) in pairs if a != b), len(prompt)))
        return longest // self._block_size * self._block_size

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer /v1/completions."""
        body = await request.json()
        prompt, length = body["prompt"], body["max_tokens"]
        self._counts["hits"] += self._find(prompt)
        self._counts["prompt"] += len(prompt)
        self._counts["generated"] += length
        self._prompts.append(prompt)
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(length):
            await asyncio.sleep(self._delay / (1 if index == 0 else 10))
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": length}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer /metrics."""
        return web.Response(text=METRICS.format(**self._counts))

    async def health(self, request: web.Request) -> web.Response:
        """Answer /health."""
        return web.Response()


def fake_command(options: Any, port: int) -> list[str]:
    """Stand in for ``servers.server_command``."""
    fake = FAKES.get(options.backend, FAKES["vllm"])
    return [sys.executable, "-m", "tests.benchmarks.fake_vllm_server", str(port), *fake]


def main(port: str, block_size: str, delay_ms: str) -> None:
    """Serve until ended."""
    server = FakeServer(int(block_size), float(delay_ms) / 1e3)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/health", server.health)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
