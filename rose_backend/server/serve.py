"""Start the server, and stop it without losing an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rose_backend import __version__
from rose_backend.config import EngineConfig
from rose_backend.engine.client import EngineClient
from rose_backend.engine.process_settings import note_imports, process_age_s
from rose_backend.engine.remote_engine import RemoteEngine
from rose_backend.errors import ConfigError
from rose_backend.server import page, routes
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.connection import MAX_LINGERING, ConnectionConfig
from rose_backend.server.error_answers import add_error_handlers
from rose_backend.server.middleware import DirectRoutes, Middleware
from rose_backend.server.protocol import ErrorAnswer
from rose_backend.server.service import Service
from rose_backend.server.settings import ServerSettings
from rose_backend.server.stats_log import log_stats

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 1
_NUM_OTHER_FILES = 128 + MAX_LINGERING
"""Files and sockets that are not client connections."""
_ABORT_TIMEOUT_S = 5.0
"""How long aborted requests may take to send their last output."""


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Load the model and serve it until SIGTERM or Ctrl-C.

    Returns:
        The exit code: 1 when the engine failed meanwhile.

    Raises:
        ConfigError: an option does not fit the model or the machine, or the address cannot be used.
        ModelError: the model cannot be loaded.
        EngineDeadError: the engine's process ended while it was loading.
    """
    # Both before the model is loaded, so that a mistake is reported at once. No client can connect before that is done.
    _allow_open_files(settings.max_connections)
    with _bound(settings) as listener:
        server = make_server(make_service(config, settings))
        server.run(sockets=[listener])
    return EXIT_ENGINE_DEAD if server.engine_has_died else 0


def make_service(config: EngineConfig, settings: ServerSettings) -> Service:
    """Load the model, in this process or in a separate one; errors are those of ``serve``."""
    for name in ("lora_modules", "runtime_lora_dir"):
        if getattr(settings, name) and not config.enable_lora:
            raise ConfigError(f"{name}: allowed with enable_lora only")
    chat_template = ChatTemplate(settings.chat_template)
    engine: EngineClient
    if settings.replicas is not None:
        try:
            from rose_backend.server.replicas import ReplicatedEngine
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"replicas: needs {error.name}, which is not installed; pip install 'WHEEL[ray]' brings it"
            ) from error
        engine = ReplicatedEngine(config, settings.replicas, settings.drain_timeout_s, chat_template.use)
    elif settings.frontend_multiprocessing:
        engine = RemoteEngine(config, chat_template.use)
    else:
        chat_template.check_syntax()
        # Imported here: a process that only serves HTTP does without torch.
        from rose_backend.engine.async_engine import AsyncEngine

        note_imports()
        options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        engine = AsyncEngine(options.pop("model"), **options)
        chat_template.use(engine.tokenizer)
    return Service(engine, settings, chat_template)


def build_app(service: Service) -> ASGIApp:
    """Return the application. The caller shuts the service's engine down."""
    # FastAPI, except that /docs takes its scripts from this package and not from the network.
    app = FastAPIOffline(
        title="rose_backend",
        version=__version__,
        redoc_url=None,
        # A redirect would name the host that the request names, which anybody may have chosen.
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    app.state.service = service
    add_error_handlers(app)
    app.include_router(routes.router)
    settings, direct_routes = service.settings, routes.DIRECT_ROUTES
    if settings.runtime_lora_dir is not None:
        app.include_router(routes.adapter_router)
        direct_routes = {**direct_routes, **routes.ADAPTER_ROUTES}
    if settings.page:
        app.include_router(page.router)
    answers = Middleware(DirectRoutes(app, direct_routes), service)
    if not settings.allowed_origins:
        return answers
    # Around all else: a browser asks without a key whether a page may send a request, and shows it refusals only with
    # these headers.
    return CORSMiddleware(
        answers,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )


def make_server(service: Service) -> DrainingServer:
    """Return a server for sockets that are bound already."""
    config = ConnectionConfig(
        build_app(service),
        service,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(_ABORT_TIMEOUT_S),
    )
    return DrainingServer(config, service)


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or Ctrl-C refuses new requests and lets running ones finish; the second stops at once.

    Requests still running after ``drain_timeout_s`` are aborted: they are answered with the tokens they have.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._stats_log: asyncio.Task[None] | None = None
        self.engine_has_died = False
        """Set when the server has ended."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await self._service.engine.start()
        try:
            await self._service.adapters.load_first()
        except BaseException:
            await self._service.engine.shutdown()
            raise
        await super().startup(sockets)
        for listener in sockets or ():
            age_s = process_age_s()
            logger.info("serving %s on %s after %.1f s", self._service.model_name, _describe(listener), age_s)
        settings = self._service.settings
        if settings.log_stats:
            log = log_stats(self._service.engine, exact_cached_tokens=settings.exact_cached_tokens)
            self._stats_log = asyncio.create_task(log)
        self._loop = asyncio.get_running_loop()
        if self._service.is_draining:
            self._begin_drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, then the engine."""
        for task in (self._drain, self._stats_log):
            if task is not None:
                task.cancel()
        await super().shutdown(sockets)
        self.engine_has_died = not self._service.engine.is_running
        await self._service.engine.shutdown()
        # After a second signal: lets streams send the error that ends them.
        await self._wait_until_idle(1.0)
        if self._service.tracing is not None:
            await asyncio.to_thread(self._service.tracing.close)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, between any two instructions of this thread."""
        if self._service.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._service.is_draining = True
        if self._loop is not None:  # else it begins at the end of ``startup``
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._finish_requests())

    async def _finish_requests(self) -> None:
        service = self._service
        logger.info("shutting down; %d requests are running", service.num_active_requests)
        try:
            if not await self._wait_until_idle(service.settings.drain_timeout_s):
                logger.warning("time is up; aborting %d requests", service.num_active_requests)
                await service.abort_all()
                await self._wait_until_idle(_ABORT_TIMEOUT_S)
        finally:
            self.should_exit = True

    async def _wait_until_idle(self, timeout_s: float) -> bool:
        """Return whether all requests have ended in time."""
        deadline = time.monotonic() + timeout_s
        while self._service.num_active_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not self._service.num_active_requests


def _allow_open_files(num_connections: int) -> None:
    """Raise the limit of open files to what the allowed connections need.

    Raises:
        ConfigError: the system does not allow that many.
    """
    num_files = num_connections + _NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    if hard != resource.RLIM_INFINITY and hard < num_files:
        raise ConfigError(
            f"max_connections: got {num_connections}, allowed are at most {max(hard - _NUM_OTHER_FILES, 0)} where a "
            f"process may open {hard} files (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


@contextlib.contextmanager
def _bound(settings: ServerSettings) -> Iterator[socket.socket]:
    """Hold the address; the file of a Unix socket is removed at the end."""
    listener = bind(settings)
    file = None if settings.uds is None else os.stat(settings.uds)
    try:
        yield listener
    finally:
        listener.close()
        if settings.uds is not None and file is not None:
            # Another program may have put something else there.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(settings.uds), file):
                    os.unlink(settings.uds)


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address. Clients are refused until the server listens; on a Unix socket they wait.

    Raises:
        ConfigError: it is in use, or not this machine's.
    """
    try:
        if settings.uds is not None:
            return _bind_unix_socket(settings.uds)
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        # A port whose last server has just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        where = settings.uds if settings.uds is not None else f"{settings.host}:{settings.port}"
        name = "uds" if settings.uds is not None else "host, port"
        raise ConfigError(f"{name}: got {where}, which cannot be used ({error.strerror or error})") from error
    return listener


def _bind_unix_socket(path: str) -> socket.socket:
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Two servers that start at once must not both find the same file left over.
        fcntl.flock(directory, fcntl.LOCK_EX)
        _remove_left_over(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            # Without a listener it would look left over while the model is loading.
            listener.listen()
        except BaseException:
            listener.close()
            raise
    finally:
        os.close(directory)
    return listener


def _remove_left_over(path: str) -> None:
    """Remove the socket of a server that has ended.

    Raises:
        ConfigError: it is no socket, or a server listens there.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds: got {path}, which exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A full queue also means that a server is alive.
        probe.setblocking(False)
        result = probe.connect_ex(path)
    if result != errno.ECONNREFUSED:
        why = "a server listens there" if result in (0, errno.EAGAIN) else os.strerror(result)
        raise ConfigError(f"uds: got {path}, which is in use ({why})")
    os.unlink(path)


def _describe(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
