"""What all routes of a running server share: engine, prefix-cache namespaces, settings, metrics, log line."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b

from starlette.datastructures import Headers

from rose_backend.block_manager import reporting_unit
from rose_backend.engine.client import EngineClient
from rose_backend.engine.generation_config import sampling_defaults
from rose_backend.engine.input_processor import check_cache_salt
from rose_backend.server.chat_template import ChatTemplate
from rose_backend.server.metrics import ServerMetrics
from rose_backend.server.settings import ServerSettings

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("rose_backend.server.requests")
_MAX_ERROR_CHARACTERS = 300


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, as its log line and the metrics describe it. Filled in while the server handles it."""

    request_id: str
    route: str
    start_s: float = field(default_factory=time.monotonic)
    status: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    """``time.monotonic`` when the first token came back from the engine."""
    finish_reasons: set[str] = field(default_factory=set)
    error: str | None = None
    """Why the request was refused, or could not be completed."""

    def log(self) -> None:
        """Write the line: ``name=value`` pairs, tokens and times only of requests that reached the engine."""
        parts = [f"id={self.request_id}", f"route={self.route}", f"status={self.status}"]
        if self.num_prompt_tokens:
            parts += [
                f"prompt_tokens={self.num_prompt_tokens}",
                f"cached_tokens={self.num_cached_tokens}",
                f"output_tokens={self.num_output_tokens}",
            ]
        if self.first_token_s is not None:
            parts.append(f"ttft_ms={(self.first_token_s - self.start_s) * 1e3:.1f}")
        parts.append(f"latency_ms={(time.monotonic() - self.start_s) * 1e3:.1f}")
        if self.finish_reasons:
            parts.append(f"finish={','.join(sorted(self.finish_reasons))}")
        if self.error is not None:
            parts.append(f"error={self.error[:_MAX_ERROR_CHARACTERS]!r}")
        request_logger.info(" ".join(parts))


class CacheNamespaces:
    """Gives each API key a prefix cache that no other key can read, with any ``cache_salt``.

    A namespace is a digest under a secret of this process: neither key nor salt can be derived from it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._is_per_key = bool(settings.api_keys) and not settings.share_prefix_cache
        self._secret = secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    def namespace(self, headers: Headers, cache_salt: str | None) -> bytes:
        """Return the prefix cache of a request; empty for the one that all requests without a salt share.

        Args:
            headers: of a request that has been authorized.
            cache_salt: the request's own; with the same key, only requests with the same salt share prefixes.

        Raises:
            RequestError: see ``check_cache_salt``.
        """
        check_cache_salt(cache_salt)
        key = headers.get("authorization", "").partition(" ")[2].encode() if self._is_per_key else b""
        if not key and cache_salt is None:
            return b""
        salt = b"" if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
        # With its length in front, no key and salt read like another key and salt. A salt is never empty.
        message = len(key).to_bytes(8, "little") + key + salt
        return blake2b(message, key=self._secret, digest_size=32).digest()


class Service:
    """An engine with the server's settings, metrics and unfinished requests. Belongs to the event loop's thread."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, chat_template: ChatTemplate) -> None:
        self.engine = engine
        self.settings = settings
        self.chat_template = chat_template
        self.sampling_defaults = sampling_defaults(engine.config)
        """Of requests that do not say. A limit of answers counts in conversations only, as in vLLM."""
        if self.sampling_defaults.fields or self.sampling_defaults.max_new_tokens is not None:
            logger.info(
                "sampling parameters that requests leave open are those of generation_config.json, %s; "
                "--generation-config none takes the API's",
                self.sampling_defaults,
            )
        self.model_name = settings.served_model_names[0]
        """The name that responses carry."""
        self.metrics = ServerMetrics(
            self.model_name,
            block_size=engine.config.block_size,
            num_blocks=engine.num_blocks,
            max_model_len=engine.input_processor.max_model_len,
            exact_cached_tokens=settings.exact_cached_tokens,
        )
        self.namespaces = CacheNamespaces(settings)
        self.hit_unit = 1 if settings.exact_cached_tokens else reporting_unit(engine.config.block_size)
        """Numbers of cached tokens are reported in multiples of this."""
        self.start_time_s = int(time.time())
        self.is_draining = False
        """Set by the first signal to stop: running requests continue, new ones are refused."""
        self.num_active_requests = 0
        """HTTP requests to routes that generate."""
        self.engine_request_ids: set[str] = set()
        """Unfinished requests inside the engine."""

    async def abort_all(self) -> None:
        """Abort every request; each is still answered with the tokens it has."""
        for request_id in tuple(self.engine_request_ids):
            await self.engine.abort(request_id)
