"""The ASGI application: all routes behind the middleware."""

from __future__ import annotations

from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp

from rose_backend import __version__
from rose_backend.server import generation_routes, operation_routes
from rose_backend.server.answer_models import ErrorAnswer
from rose_backend.server.direct_routes import DirectRoutes
from rose_backend.server.error_answers import add_error_handlers
from rose_backend.server.middleware import Middleware
from rose_backend.server.service import Service


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
    app.include_router(generation_routes.router)
    app.include_router(operation_routes.router)
    direct_routes = generation_routes.DIRECT_ROUTES | operation_routes.DIRECT_ROUTES
    return Middleware(DirectRoutes(app, direct_routes), service)
