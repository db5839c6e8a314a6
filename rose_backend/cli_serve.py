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
    group.add_argument(
        "--uds",
        metavar="FILE",
        help="Unix socket to listen on instead of host and port; the umask says who may connect",
    )
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
    _add_limits(group)
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="N",
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--send-timeout-s",
        type=float,
        default=60.0,
        metavar="N",
        help="seconds after which a client that reads nothing of its answer is cut off and its request aborted; 0 "
        "waits for ever (default: %(default)s)",
    )
    group.add_argument(
        "--share-prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="one prefix cache for all API keys: a key's holder can find out what others have sent (default: off, one "
        "for each key)",
    )
    group.add_argument(
        "--exact-cached-tokens",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="tell clients and metrics every cached token (default: off, whole blocks of at least 16 tokens)",
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


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add what one client may ask of the server, most of it before its key is looked at."""
    limits: tuple[tuple[str, int | float, str], ...] = (
        ("max-connections", 2048, "connections at once; more are answered 503"),
        ("max-header-bytes", 64 << 10, "size of a request's header, its first line included"),
        ("max-headers", 256, "number of a request's headers"),
        ("header-timeout-s", 10.0, "seconds until a request's header must be complete"),
        ("max-body-bytes", 16 << 20, "size of a request's body"),
        ("body-timeout-s", 60.0, "seconds until a request's body must be complete, after its header"),
        ("keep-alive-timeout-s", 5.0, "seconds that a connection may stay idle between requests"),
        ("max-prompts", 1024, "prompts of one request"),
    )
    for name, default, meaning in limits:
        group.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default:g})"
            if isinstance(default, float)
            else f"{meaning} (default: {default})",
        )


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
    settings = ServerSettings(
        served_model_names=tuple(args.served_model_name or [model]),
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(args.api_key or _keys_of_environment()),
        chat_template=args.chat_template,
        max_connections=args.max_connections,
        max_header_bytes=args.max_header_bytes,
        max_headers=args.max_headers,
        header_timeout_s=args.header_timeout_s,
        max_body_bytes=args.max_body_bytes,
        body_timeout_s=args.body_timeout_s,
        keep_alive_timeout_s=args.keep_alive_timeout_s,
        max_prompts=args.max_prompts,
        drain_timeout_s=args.drain_timeout_s,
        send_timeout_s=args.send_timeout_s,
        share_prefix_cache=args.share_prefix_cache,
        exact_cached_tokens=args.exact_cached_tokens,
        log_requests=args.log_requests,
        frontend_multiprocessing=args.frontend_multiprocessing,
    )
    _log_with_times(LOG_FORMAT)
    return serve(config, settings)


def _keys_of_environment() -> list[str]:
    key = os.environ.get(API_KEY_VARIABLE)
    if key is None:
        return []
    # More likely a secret that went missing than the wish to serve everybody.
    if not key.strip():
        raise ConfigError(f"{API_KEY_VARIABLE}: is set but empty; give it a key, or unset it to ask for none")
    return [key]


def _log_with_times(log_format: str) -> None:
    """A server's log is read later, and says what it does unless told otherwise."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(log_format))
    if "ROSE_LOG_LEVEL" not in os.environ:
        logging.getLogger("rose_backend").setLevel(logging.INFO)
