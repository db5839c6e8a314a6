"""How the server listens and what it accepts. What the engine does is ``EngineConfig``'s."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose_backend.config import check_int
from rose_backend.errors import ConfigError
from rose_backend.server.tracing import check_tracing

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
"""vLLM's names of formats in which models call tools."""
REASONING_PARSERS = ("qwen3", "deepseek_r1")
"""vLLM's names of how models write reasoning. Answers of qwen3 have none where ``enable_thinking`` is false."""
RETRY_AFTER_S = 1
"""Value of the Retry-After header of refusals."""
MAX_MESSAGES = 1024
"""Messages of one chat request."""
MAX_METADATA = 16
"""Fields of a request's ``metadata``, as OpenAI has it."""
MAX_BLOCKS = 4096
"""Messages of one request in Anthropic's format and their blocks together."""
MAX_PARTS = 256
"""Parts of one message."""
MAX_NAME_LENGTH = 256
"""Characters of a message's ``name``."""
MAX_TOOLS = 128
"""Tools of one chat request, and tool calls of one message."""
MAX_ARGUMENTS_LENGTH = 1 << 19
"""Characters of the arguments of one tool call; longer ones would take more than some milliseconds to parse."""
MAX_JSON_DEPTH = 64
"""Levels of lists and objects in what a client hands to the chat template."""
MAX_JSON_VALUES = 65_536
"""Values in it."""
MAX_BODY_FIELDS = 65_536
"""Fields of all objects in one body."""
MAX_BODY_LISTS = 16_384
"""Lists and objects in one body, beside one list for each prompt."""
MAX_REPLICAS = 1024
"""Engines of one server."""
MAX_UNKNOWN_FIELDS = 16
"""Unknown fields of one request; each is compared with all known names."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """An adapter that a server loads at its start."""

    name: str
    path: str
    base_model_name: str | None = None
    """The parent that ``/v1/models`` names; None, or no served name: the first served name."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of ``rose serve`` that are not the engine's.

    Raises:
        ConfigError: names the option, what was got and what is allowed.
    """

    served_model_names: tuple[str, ...]
    """Names that requests may use for the model; answers carry the first."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    api_keys: tuple[str, ...] = ()
    """Any of them is accepted as a bearer token or in X-Api-Key; none: no key is asked for."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages browsers let read answers, ``*`` for all; none: CORS is off."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that these pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send."""
    allow_credentials: bool = False
    """Let them send cookies and the like."""
    chat_template: str | None = None
    """File with a Jinja template to use instead of the tokenizer's own."""
    enable_auto_tool_choice: bool = False
    """Let the model choose whether to call tools."""
    tool_call_parser: str | None = None
    """How it writes calls, one of ``TOOL_CALL_PARSERS``."""
    reasoning_parser: str | None = None
    """How the model marks the reasoning before its answer, one of ``REASONING_PARSERS``; None: it is content."""
    lora_modules: tuple[LoRAModule, ...] = ()
    """Adapters to load at the start; requests name them as their model."""
    runtime_lora_dir: str | None = None
    """Directory from which clients may load adapters at run time; None: they may not."""
    max_connections: int = 2048
    """Open at once; more are answered 503 and closed."""
    max_header_bytes: int = 64 << 10
    """Of one request, its first line included."""
    max_headers: int = 256
    """Of one request."""
    header_timeout_s: float = 10.0
    """A request's header must be complete by then: after the connection was made, or after its first byte."""
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    """A request's body must be complete by then, after its header was."""
    keep_alive_timeout_s: float = 5.0
    """How long a connection may stay idle after an answer."""
    max_prompts: int = 1024
    """Prompts of one request."""
    max_answer_tokens: int = 1 << 22
    """Tokens that a request for several completions may ask for in all of them together: ``max_tokens`` of each, and as
    many again for each log-probability; of echoed prompts, each character counts as one."""
    drain_timeout_s: float = 30.0
    """How long running requests may continue after SIGTERM before they are aborted."""
    send_timeout_s: float = 60.0
    """A client that reads nothing of its answer for that long is disconnected and its requests aborted; 0: no limit."""
    share_prefix_cache: bool = False
    """Share one prefix cache among all API keys; off: each key has a separate prefix cache."""
    exact_cached_tokens: bool = False
    """Report every cached token; off: whole multiples of the block size, and of at least 16."""
    log_requests: bool = True
    """Write one line per request."""
    page: bool = True
    """Show what the engine does, and a chat, at ``/``."""
    log_stats: bool = True
    """Write a line about throughput every 10 s while there is traffic."""
    otlp_traces_endpoint: str | None = None
    """OpenTelemetry collector that gets a span for each prompt; None: there are no spans."""
    frontend_multiprocessing: bool = True
    """Run the engine in a separate process; off: in a thread of the one that serves HTTP."""
    replicas: int | Mapping[str, Any] | None = None
    """Engines, each on a GPU, that Ray Serve runs: how many, or fields of its ``AutoscalingConfig``; None: one engine
    without Ray."""

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(f"served_model_name: got {self.served_model_names!r}, allowed are names")
        for name, names in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            if getattr(self, name) not in (None, *names):
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, allowed are {', '.join(names)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice: needs tool_call_parser, which is not given")
        if isinstance(self.replicas, int):
            check_int("replicas", self.replicas, 1, MAX_REPLICAS)
        if self.replicas is not None and not self.frontend_multiprocessing:
            raise ConfigError("replicas: allowed with frontend_multiprocessing only")
        self._check_adapters()
        if self.otlp_traces_endpoint is not None:
            check_tracing(self.otlp_traces_endpoint)
        for name, low, high in (
            ("port", 0, 65_535),
            ("max_connections", 1, 1 << 20),
            ("max_header_bytes", 1024, 1 << 24),
            ("max_headers", 16, 1 << 16),
            ("max_body_bytes", 1, 1 << 32),
            ("max_prompts", 1, 1 << 20),
            ("max_answer_tokens", 1, 1 << 40),
        ):
            check_int(name, getattr(self, name), low, high)
        for origin in self.allowed_origins:
            # Browsers send an origin without a path: one with a path would never match.
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: got {origin!r}, allowed are * and origins like https://example.com or "
                    "http://localhost:3000, in small letters and without a path"
                )
        for name in ("allowed_methods", "allowed_headers"):
            for item in getattr(self, name):
                if item != "*" and not _HEADER_NAME.fullmatch(item):
                    raise ConfigError(f"{name}: got {item!r}, allowed are * and names, as they stand in HTTP")
        if not self.host:
            raise ConfigError("host: got an empty name, allowed is an address or a host name")
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_timeout_s"):
            # A day; timers of much longer ones overflow.
            if not 0.0 < (seconds := getattr(self, name)) <= 86_400.0:
                raise ConfigError(
                    f"{name}: got {seconds}, allowed is a number of seconds above 0, at most 86400"
                )
        for name, what in (("drain_timeout_s", "0 or more"), ("send_timeout_s", "or 0 to wait for ever")):
            if not 0.0 <= (seconds := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name}: got {seconds}, allowed is a number of seconds, {what}")
        # Other characters cannot be sent in a header as they are.
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError(
                "api_key: got an empty key or one with spaces or characters outside ASCII, neither is allowed"
            )

    def _check_adapters(self) -> None:
        names = list(self.served_model_names)
        for module in self.lora_modules:
            if not module.name or not module.path or not module.name.isprintable():
                raise ConfigError(
                    f"lora_modules: got name {module.name[:200]!r} and path {module.path[:200]!r}, allowed are a path "
                    "and a name that can be printed"
                )
            if module.name in names:
                raise ConfigError(
                    f"lora_modules: got {module.name!r} twice, allowed are names that no other model has"
                )
            names.append(module.name)
        if self.runtime_lora_dir is not None and not Path(self.runtime_lora_dir).is_dir():
            raise ConfigError(f"runtime_lora_dir: got {self.runtime_lora_dir!r}, allowed is a directory")
