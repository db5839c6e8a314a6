"""The LoRA adapters that requests may name as their model; texts and status codes are vLLM's.

Whoever may load one makes the server read files, so clients may do so only where the server was started with a
directory to take them from.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rose_backend.engine.client import EngineClient
from rose_backend.engine.request import LoRARequest
from rose_backend.errors import ConfigError, RequestError
from rose_backend.models.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from rose_backend.server.error_answers import ApiError
from rose_backend.server.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest, refused
from rose_backend.server.settings import ServerSettings

logger = logging.getLogger(__name__)
MAX_NAME_LENGTH = 256
_MAX_SHOWN_PATH = 200
"""Characters of an adapter's name."""
_MAX_PATH_LENGTH = 4096
"""Characters, as of Linux: following longer ones takes quadratic time."""
_WAIT_S = 10.0
"""Longest wait of a load for requests that use what was unloaded."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter that the engine has loaded."""

    lora: LoRARequest
    parent: str
    """Name of the base model."""
    root: str
    """Its path as it was given, which clients see."""
    num_requests: int = 0
    """Those that hold it. Each may have prompts that the engine does not know yet."""


class ServedAdapters:
    """The adapters of one server, by name. Belongs to the event loop's thread."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._by_name: dict[str, ServedAdapter] = {}
        self._num_loaded = 0
        # Without a name, and still held by requests.
        self._leaving: list[ServedAdapter] = []
        self._has_left = asyncio.Event()
        # Held while one is loaded or unloaded.
        self._lock = asyncio.Lock()

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._by_name.values())

    def find(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter of this name; None: there is none."""
        return None if name is None else self._by_name.get(name)

    def hold(self, served: ServedAdapter) -> None:
        """Let the engine keep an adapter until ``release``."""
        served.num_requests += 1

    def release(self, served: ServedAdapter) -> None:
        """End one ``hold``."""
        served.num_requests -= 1
        if served in self._leaving and not served.num_requests:
            self._leaving.remove(served)
            self._engine.unload_adapter(served.lora.lora_int_id)
            self._has_left.set()

    async def load_first(self) -> None:
        """Load the adapters that the server was started with.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        for module in self._settings.lora_modules:
            try:
                await self._load(module.name, module.path, module.base_model_name, module.path)
            except RequestError as error:
                raise ConfigError(f"lora_modules: {module.name!r}: {error}") from error

    async def load(self, body: LoadLoRAAdapterRequest) -> None:
        """Load one that a client names.

        Raises:
            ApiError: there is no such adapter.
            RequestError: it is not allowed, or cannot be loaded.
        """
        name = body.lora_name
        if not name or not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if len(name) > MAX_NAME_LENGTH:
            raise refused("lora_name", f"got {len(name)} characters, allowed are at most {MAX_NAME_LENGTH}")
        if len(body.lora_path) > _MAX_PATH_LENGTH:
            raise refused(
                "lora_path", f"got {len(body.lora_path)} characters, allowed are at most {_MAX_PATH_LENGTH}"
            )
        if not name.isprintable():
            raise refused("lora_name", f"got {name!r}, allowed are characters that can be printed")
        if name in self._settings.served_model_names:
            raise ApiError(
                400, f"The lora adapter '{name}' conflicts with a served base model.", param="lora_name"
            )
        async with self._lock:
            if name in self._by_name and not body.load_inplace:
                raise ApiError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    param="lora_name",
                )
            path = await asyncio.to_thread(self._find_files, name, body.lora_path)
            try:
                await self._load(name, path, None, body.lora_path)
            except RequestError as error:
                if error.parameter != "lora_path":
                    raise
                raise _with_path(error, path, body.lora_path) from error

    async def unload(self, body: UnloadLoRAAdapterRequest) -> None:
        """Unload one. Requests that use it go on.

        Raises:
            ApiError: there is none of this name.
        """
        name = body.lora_name
        if not name:
            raise ApiError(
                400, "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
            )
        async with self._lock:
            served = self._by_name.pop(name, None)
            if served is None:
                raise ApiError(
                    404, f"The lora adapter '{name[:MAX_NAME_LENGTH]}' cannot be found.", param="lora_name"
                )
            self._let_go(served)
            logger.info("unloaded LoRA adapter %r", name)

    async def _load(self, name: str, path: str, base_model_name: str | None, root: str) -> None:
        """Load an adapter, in place of the one that has its name, if any. Clients see ``root``, not ``path``."""
        await self._wait_for_slot(name)
        self._num_loaded += 1
        lora = LoRARequest(name, self._num_loaded, path)
        await self._engine.load_adapter(lora)
        names = self._settings.served_model_names
        before, parent = self._by_name.get(name), base_model_name if base_model_name in names else names[0]
        self._by_name[name] = ServedAdapter(lora, str(parent), root)
        if before is not None:
            self._let_go(before)

    def _let_go(self, served: ServedAdapter) -> None:
        """Unload an adapter that has no name any more, as soon as no request holds it."""
        if served.num_requests:
            self._leaving.append(served)
        else:
            self._engine.unload_adapter(served.lora.lora_int_id)

    async def _wait_for_slot(self, name: str) -> None:
        num_slots = self._engine.config.max_loras
        try:
            async with asyncio.timeout(_WAIT_S):
                while self._leaving and len(self._by_name) + len(self._leaving) >= num_slots:
                    self._has_left.clear()
                    await self._has_left.wait()
        except TimeoutError as error:
            raise refused(
                "lora_name",
                f"got {name!r}, allowed are {num_slots} adapters at once (max_loras), which are loaded; "
                f"{len(self._leaving)} of them until requests under way have ended",
            ) from error

    def _find_files(self, name: str, path: str) -> str:
        """Return the directory of an adapter inside the folder that clients may load from."""
        assert self._settings.runtime_lora_dir is not None, "there is no route without it"
        try:
            root = Path(self._settings.runtime_lora_dir).resolve()
            directory = (root / path).resolve()
            inside = [
                each.resolve().is_relative_to(root)
                for each in map(directory.joinpath, ("", ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE))
            ]
            exists = all(inside) and (directory / ADAPTER_CONFIG_FILE).is_file()
        except ValueError as error:
            raise refused("lora_path", "got what cannot be a path") from error
        except (OSError, RuntimeError) as error:
            raise refused("lora_path", "got a path that cannot be followed to its end") from error
        if not all(inside):
            # One text for all of them: a client learns nothing of other directories, as long as nobody puts links here.
            raise refused(
                "lora_path", f"got {path[:200]!r}, allowed are directories inside that of --runtime-lora-dir"
            )
        if not exists:
            raise ApiError(
                404,
                f"Loading lora {name} failed: No adapter found for {path[:_MAX_SHOWN_PATH]}",
                param="lora_path",
            )
        return str(directory)


def _with_path(error: RequestError, path: str, given: str) -> RequestError:
    """Return the refusal with the path as the client gave it, so that it does not show the server's directories."""
    own = given[:_MAX_SHOWN_PATH]
    # Some refusals show it as it is, others as Python writes strings.
    shown = {repr(path)[1:-1]: repr(own)[1:-1], path: own}
    text = re.sub("|".join(map(re.escape, shown)), lambda match: shown[match[0]], str(error))
    return RequestError(text, parameter=error.parameter)
