"""What the parts of a running server share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Protocol

from rose_backend.block_manager import reporting_unit
from rose_backend.config import EngineConfig
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Prompt
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.engine_messages import Counters
from rose_backend.server.metrics import ServerMetrics
from rose_backend.server.namespaces import CacheNamespaces
from rose_backend.server.settings import ServerSettings


class Engine(Protocol):
    """What a server needs of an engine, wherever that runs: see ``AsyncEngine`` for what is not said here."""

    config: EngineConfig

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus output, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model are below it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""

    @property
    def is_running(self) -> bool:
        """False after a failure or ``shutdown``."""

    async def start(self) -> None:
        """Serve the callers on the running event loop. Comes before all that follow."""

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt; ``outputs[i].delta_text`` is the text that is new."""

    async def abort(self, request_id: str) -> bool:
        """End a request; it still gets a last output."""

    async def counters(self) -> Counters:
        """Return what the engine has done, and what it has in use."""

    async def shutdown(self) -> None:
        """Stop after the present step."""


class Service:
    """An engine, how it is served, and who is being served. Belongs to the event loop's thread."""

    def __init__(self, engine: Engine, settings: ServerSettings, chat_template: ChatTemplate) -> None:
        self.engine = engine
        self.settings = settings
        self.chat_template = chat_template
        self.metrics = ServerMetrics(
            engine, self.model_name, exact_cached_tokens=settings.exact_cached_tokens
        )
        self.namespaces = CacheNamespaces(settings)
        self.hit_unit = 1 if settings.exact_cached_tokens else reporting_unit(engine.config.block_size)
        """Cached tokens are told in multiples of so many."""
        self.start_time_s = int(time.time())
        self.is_draining = False
        """Set once the server has been told to stop: running requests go on, new ones are refused."""
        self.num_active_requests = 0
        """HTTP requests to routes that generate."""
        self.engine_request_ids: set[str] = set()
        """Unfinished requests inside the engine."""

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.served_model_names[0]

    async def abort_all(self) -> None:
        """End every request; each still gets an answer with what it has."""
        for request_id in tuple(self.engine_request_ids):
            await self.engine.abort(request_id)
