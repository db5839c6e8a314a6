"""What the parts of a running server share."""

from __future__ import annotations

import time

from rose_backend.engine.async_engine import AsyncEngine
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.metrics import ServerMetrics
from rose_backend.server.settings import ServerSettings


class Service:
    """An engine, how it is served, and who is being served. Belongs to the event loop's thread."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, chat_template: ChatTemplate) -> None:
        self.engine = engine
        self.settings = settings
        self.chat_template = chat_template
        self.metrics = ServerMetrics(engine, self.model_name)
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
