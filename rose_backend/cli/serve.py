"""``rose serve``: an OpenAI-compatible HTTP server over the standalone engine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import stat
from typing import Any

from rose_backend import __version__
from rose_backend.cli.options import Commands, add_engine_options, engine_config, option_of, value_arguments
from rose_backend.engine.process_settings import LOG_FORMAT
from rose_backend.errors import ConfigError
from rose_backend.server.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, LoRAModule, ServerSettings

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ROSE_API_KEY"

# In the order of --help.
_SERVER_HELP = {
    "host": "address to listen on (default: %(default)s)",
    "port": "0 takes a free one (default: %(default)s)",
    "uds": "Unix socket to listen on instead of host and port; the umask says who may connect",
    "served_model_name": "names that requests may use; answers carry the first (default: the model's path)",
    "api_key": f"key that requests must bring; may be given several times (default: ${API_KEY_VARIABLE}). "
    "Every user of this machine can read it in the list of processes: better use the variable or a file",
    "api_key_file": "file of such keys, one a line, empty lines left out; they count beside those of --api-key",
    "allowed_origins": "origins whose web pages may use this server from a browser, as a JSON list, '[\"*\"]' for all "
    "(default: none)",
    "allowed_methods": "HTTP methods that these pages may use, as a JSON list (default: '[\"*\"]', all)",
    "allowed_headers": "HTTP headers that these pages may send, as a JSON list (default: '[\"*\"]', all)",
    "allow_credentials": "let these pages send cookies and the like, which this server does not use (default: off)",
    "chat_template": "Jinja template to use instead of the model's",
    "enable_auto_tool_choice": "let the model choose whether to call a request's tools; needs --tool-call-parser "
    "(default: off)",
    "tool_call_parser": "how the model writes calls of tools: hermes is for Hermes and Qwen models, llama3_json for "
    "Llama 3 and 4, mistral for Mistral models",
    "reasoning_parser": "how the model writes reasoning, which answers then have apart from their content: qwen3 or "
    "deepseek_r1, both up to </think> (default: as content)",
    "lora_modules": "LoRA adapters to load at the start, each as NAME=PATH or as a JSON object with name, path and "
    "base_model_name; requests name them as their model; needs --enable-lora",
    "runtime_lora_dir": "directory from which clients may load and unload LoRA adapters, by /v1/load_lora_adapter and "
    "/v1/unload_lora_adapter; needs --enable-lora (default: neither route is there)",
    # What one client may ask of the server, most of it checked before its key.
    "max_connections": "connections at once; more are answered 503 (default: %(default)s)",
    "max_header_bytes": "size of a request's header, its first line included (default: %(default)s)",
    "max_headers": "number of a request's headers (default: %(default)s)",
    "header_timeout_s": "seconds until a request's header must be complete (default: %(default)g)",
    "max_body_bytes": "size of a request's body (default: %(default)s)",
    "body_timeout_s": "seconds until a request's body must be complete, after its header (default: %(default)g)",
    "keep_alive_timeout_s": "seconds that a connection may stay idle between requests (default: %(default)g)",
    "max_prompts": "prompts of one request (default: %(default)s)",
    "max_answer_tokens": "tokens that one request may ask for: prompts x n x max_tokens x (1 + log-probabilities), and "
    "each character of an echoed prompt and log-probability of a prompt; a single completion may always fill the "
    "window (default: %(default)s)",
    "drain_timeout_s": "seconds that running requests may go on after SIGTERM (default: %(default)s)",
    "send_timeout_s": "seconds after which a client that reads nothing of its answer is cut off and its request "
    "aborted; 0 waits for ever (default: %(default)s)",
    "share_prefix_cache": "one prefix cache for all API keys: a key's holder can find out what others have sent "
    "(default: off, one for each key)",
    "exact_cached_tokens": "tell clients and metrics every cached token (default: off, whole blocks of at least 16 "
    "tokens)",
    "log_requests": "log one line per request (default: on)",
    "page": "serve a page at / that shows requests, throughput and KV blocks, and has a chat (default: on)",
    "log_stats": "log throughput, requests and KV cache usage every 10 s while there is traffic (default: on)",
    "otlp_traces_endpoint": "address of an OpenTelemetry collector that gets a span for each prompt, such as "
    "http://localhost:4317 (default: no spans)",
    "frontend_multiprocessing": "run the engine in a separate process, beside the one that serves HTTP (default: on)",
    "replicas": "engines that Ray Serve runs, each on a GPU: how many, or fields of Ray Serve's AutoscalingConfig as a "
    'JSON object, such as \'{"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}\' (default: one '
    "engine, without Ray)",
}


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError
    return tuple(names)


_names.__name__ = "JSON list of texts"  # argparse puts the name into its error message


def _lora_modules(text: str) -> tuple[LoRAModule, ...]:
    """Return what one argument names: an adapter, or as JSON one or a list of them."""
    # As in vLLM, which tells JSON by the same signs.
    if "=" in text and "," not in text:
        name, _, path = text.partition("=")
        return (LoRAModule(name, path),)
    try:
        found = json.loads(text) if text else []
    except RecursionError as error:
        raise ValueError from error
    modules = []
    for fields in found if isinstance(found, list) else [found]:
        # Of models with experts only.
        module = LoRAModule(**{name: fields[name] for name in fields if name != "is_3d_lora_weight"})
        if not all(
            isinstance(each, str) for each in (module.name, module.path, module.base_model_name or "")
        ):
            raise ValueError
        modules.append(module)
    return tuple(modules)


def _replicas(text: str) -> int | dict[str, Any]:
    found = json.loads(text)
    if isinstance(found, bool) or not isinstance(found, int | dict):
        raise ValueError
    return found


_replicas.__name__ = "number or JSON object"
_lora_modules.__name__ = "adapter, NAME=PATH or JSON"
# How argparse reads options that are neither numbers nor switches.
_SERVER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "host": {"type": str},
    "port": {"type": int},
    "uds": {"metavar": "FILE"},
    "served_model_name": {"nargs": "+", "metavar": "NAME"},
    "api_key": {"action": "append", "metavar": "KEY"},
    "api_key_file": {"metavar": "FILE"},
    "allowed_origins": {"type": _names, "metavar": "JSON"},
    "allowed_methods": {"type": _names, "metavar": "JSON"},
    "allowed_headers": {"type": _names, "metavar": "JSON"},
    "chat_template": {"metavar": "FILE"},
    "lora_modules": {"nargs": "+", "type": _lora_modules, "metavar": "NAME=PATH"},
    "runtime_lora_dir": {"metavar": "DIR"},
    "otlp_traces_endpoint": {"metavar": "URL"},
    "replicas": {"type": _replicas, "metavar": "N"},
    "tool_call_parser": {"metavar": "NAME", "choices": TOOL_CALL_PARSERS},
    "reasoning_parser": {"metavar": "NAME", "choices": REASONING_PARSERS},
}


def add_serve_command(commands: Commands) -> None:
    """Add ``rose serve`` with its options."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serve /v1/completions, /v1/chat/completions, /v1/responses, Anthropic's /v1/messages and more. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one stops at once.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="local directory or Hugging Face id")
    parser.add_argument("--model", metavar="PATH", help="the same as PATH")
    group = parser.add_argument_group("server")
    fields = {field.name: field for field in dataclasses.fields(ServerSettings)}
    for name, text in _SERVER_HELP.items():
        arguments = _SERVER_ARGUMENTS.get(name) or value_arguments(fields[name])
        default = fields[name].default if name in fields else None
        group.add_argument(option_of(name), default=default, help=text, **arguments)
    add_engine_options(parser)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    if (args.path is None) == (args.model is None):
        raise ConfigError("serve: give the model once, as PATH or as --model PATH")
    model = args.path or args.model
    config = engine_config(model, args)
    options = {name: getattr(args, name) for name in _SERVER_HELP}
    names, keys, key_file = (options.pop(name) for name in ("served_model_name", "api_key", "api_key_file"))
    keys = [*(keys or ()), *(() if key_file is None else _keys_of_file(key_file))] or _keys_of_environment()
    options["lora_modules"] = tuple(each for given in options["lora_modules"] for each in given)
    settings = ServerSettings(served_model_names=tuple(names or [model]), api_keys=tuple(keys), **options)
    _log_with_times()
    logger.info("starting to serve %s with rose %s; importing PyTorch may take a while", model, __version__)
    # Imported here: neither --help, nor mistakes in the options, nor the line above should wait for these.
    try:
        from rose_backend.server.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve: needs {error.name}, which is not installed; pip install 'WHEEL[serve]' brings it"
        ) from error
    return serve(config, settings)


def _keys_of_environment() -> list[str]:
    key = os.environ.get(API_KEY_VARIABLE)
    if key is None:
        return []
    # Probably a missing secret, which must not disable authentication.
    if not key.strip():
        raise ConfigError(f"{API_KEY_VARIABLE}: is set but empty; give it a key, or unset it to ask for none")
    return [key]


def _keys_of_file(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
            is_open_to_all = bool(os.fstat(file.fileno()).st_mode & stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"api_key_file: cannot read {path} ({reason})") from error
    keys = [key for line in lines if (key := line.strip())]
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no key, one a line is needed")
    if is_open_to_all:
        logger.warning("api_key_file: every user of this machine can read %s", path)
    return keys


def _log_with_times() -> None:
    """Add times to log lines, and log at INFO unless ROSE_LOG_LEVEL is set."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
    if "ROSE_LOG_LEVEL" not in os.environ:
        logging.getLogger("rose_backend").setLevel(logging.INFO)
