"""Who shares cached prefixes with whom: by API key, and within one by ``cache_salt``."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from starlette.datastructures import Headers

from rose_backend.server.settings import ServerSettings


class CacheNamespaces:
    """Gives each API key a part of the prefix cache that no other key can read, whatever salt it sends.

    What the engine is told is a digest under a secret of this process: neither key nor salt can be had from it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._is_per_key = bool(settings.api_keys) and not settings.share_prefix_cache
        self._secret = secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    def engine_salt(self, headers: Headers, cache_salt: str | None) -> str | None:
        """Return the salt under which the engine caches a request; None: what all share who send none.

        Args:
            headers: of a request that was let in.
            cache_salt: the request's own.
        """
        key = headers.get("authorization", "").partition(" ")[2].encode() if self._is_per_key else b""
        if not key and cache_salt is None:
            return None
        salt = b"" if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
        # With its length in front, no key and salt read like another key and salt. A salt is never empty.
        message = len(key).to_bytes(8, "little") + key + salt
        return blake2b(message, key=self._secret, digest_size=32).hexdigest()
