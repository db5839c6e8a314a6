"""The engine in the process that serves HTTP: one process less, and one interpreter lock for everything."""

from __future__ import annotations

from rose_backend.engine.async_engine import AsyncEngine
from rose_backend.server.engine_messages import Counters


class InprocEngine(AsyncEngine):
    """``AsyncEngine`` with what only a server asks for."""

    async def start(self) -> None:
        """Do nothing: it serves callers on any event loop."""

    async def counters(self) -> Counters:
        """Return what the engine has done and what it has in use, as of some moment during the latest step."""
        return Counters(self.stats, self.load)
