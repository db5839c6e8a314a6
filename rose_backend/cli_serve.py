"""``rose serve``: an OpenAI-compatible HTTP server over the standalone engine."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from rose_backend.cli_options import add_engine_options, engine_options
from rose_backend.config import EngineConfig
from rose_backend.errors import ConfigError

API_KEY_VARIABLE = "ROSE_API_KEY"


def add_serve_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``rose serve`` with its options."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serve /v1/completions, /v1/chat/completions and more. SIGTERM or Ctrl-C lets running requests "
        "finish; a second one stops at once.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="local directory or Hugging Face id")
    parser.add_argument("--model", metavar="PATH", help="the same as PATH")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument("--uds", metavar="FILE", help="Unix socket to listen on instead of host and port")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use; answers carry the first (default: the model's path)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must bring; may be given several times (default: ${API_KEY_VARIABLE})",
    )
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template to use instead of the model's")
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=16 << 20,
        metavar="N",
        help="size of a request (default: 16 MiB)",
    )
    group.add_argument(
        "--max-prompts",
        type=int,
        default=1024,
        metavar="N",
        help="prompts of one request (default: %(default)s)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="N",
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log one line per request (default: on)",
    )
    group.add_argument(
        "--frontend-multiprocessing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the engine in a process of its own, beside the one that serves HTTP (default: on)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    if (args.path is None) == (args.model is None):
        raise ConfigError("serve: give the model once, as PATH or as --model PATH")
    model = args.path or args.model
    config = EngineConfig(model=model, **engine_options(args))
    # Imported here: --help and mistakes in the options should not wait for torch.
    try:
        from rose_backend.server.serve import serve
        from rose_backend.server.settings import LOG_FORMAT, ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve: needs {error.name}, which is not installed; pip install 'rose-backend[serve]'"
        ) from error
    key = os.environ.get(API_KEY_VARIABLE)
    settings = ServerSettings(
        served_model_names=tuple(args.served_model_name or [model]),
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(args.api_key or ([key] if key else [])),
        chat_template=args.chat_template,
        max_body_bytes=args.max_body_bytes,
        max_prompts=args.max_prompts,
        drain_timeout_s=args.drain_timeout_s,
        log_requests=args.log_requests,
        frontend_multiprocessing=args.frontend_multiprocessing,
    )
    _log_with_times(LOG_FORMAT)
    return serve(config, settings)


def _log_with_times(log_format: str) -> None:
    """A server's log is read later, and says what it does unless told otherwise."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(log_format))
    if "ROSE_LOG_LEVEL" not in os.environ:
        logging.getLogger("rose_backend").setLevel(logging.INFO)
