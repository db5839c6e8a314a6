"""Hugging Face checkpoints: finding their files, reading config.json, and where each tensor lies.

Every way in which a checkpoint can be missing or damaged ends in a ``ModelError`` of one sentence. No tensor is read
here, and torch is imported only to name types: processes without it look for checkpoints, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rose_backend.errors import ModelError

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
"""What PEFT writes of an adapter."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt writes what newer versions also write into config.json."""

ProgressCallback = Callable[[int, int], None]
"""Takes the bytes that were read, and all that will be; called in the thread that loads."""

# By the names that safetensors gives them.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}

_HUB_FILES = ["*.json", "*.safetensors", "merges.txt", "vocab.txt", "*.model", "*.jinja"]
_HUB_PATTERNS: dict[str, Any] = {
    "allow_patterns": _HUB_FILES,
    # Mistral's and Llama's own copies of the weights, beside those that are read.
    "ignore_patterns": ["consolidated*", "original/*"],
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 5.0


def resolve_model_path(model: str | Path, *, needs_weights: bool = True) -> Path:
    """Return the local directory of a checkpoint, downloading it when ``model`` is a Hugging Face id not in the cache.

    Args:
        needs_weights: False downloads config.json alone.

    Raises:
        ModelError: neither a directory with a config.json nor an id that is cached or can be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise ModelError(f"model: directory {str(model)!r} has no {CONFIG_FILE}")
        return path
    if path.exists():
        raise ModelError(f"model: {str(model)!r} is a file, a directory or a Hugging Face id is needed")
    name = str(model)
    if not _HUB_ID.fullmatch(name) or len(name) > 96 or ".." in name or "--" in name:
        raise ModelError(f"model: {name!r} is not a directory, nor can it be a Hugging Face id")
    return _resolve_hub_id(name, needs_weights)


def _resolve_hub_id(name: str, needs_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _HUB_PATTERNS if needs_weights else {"allow_patterns": [CONFIG_FILE]}
    # The cache first: a cached model must load without a network.
    try:
        cached = Path(snapshot_download(name, local_files_only=True, **patterns))
        has_weights = not needs_weights or any(cached.glob("*.safetensors"))
        if (cached / CONFIG_FILE).is_file() and has_weights:
            return cached
    except (OSError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, etag_timeout=_HUB_TIMEOUT_S, **patterns))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model: {name!r} is neither a directory nor a Hugging Face model that is cached or can be reached"
            f" ({reason})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: missing, unreadable, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model: cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model: {str(path)!r} holds a {type(content).__name__}, a JSON object is needed")
    return content


def read_eos_token_ids(fields: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a JSON file, one or a list of them.

    Raises:
        ModelError: it is neither.
    """
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        raise ModelError(f"{file}: eos_token_id must be one integer, or a list of them, got {value!r}")
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    name: str
    path: Path
    offset: int
    """Of its first byte in the file."""
    num_bytes: int
    dtype: str
    """As safetensors writes it: ``BF16``, ``F32``."""
    shape: tuple[int, ...]


def stored_dtype(stored: StoredTensor) -> torch.dtype:
    """Return the type of a stored tensor.

    Raises:
        ModelError: it is none that can be read.
    """
    import torch

    if stored.dtype not in _DTYPES:
        raise ModelError(
            f"model: tensor {stored.name!r} is stored as {stored.dtype}, allowed are {', '.join(_DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, _DTYPES[stored.dtype])
    return dtype


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name.

    Raises:
        ModelError: a file is missing, incomplete or damaged, two files have a tensor of one name, or a tensor is not
            in the file that the index says.
    """
    index = directory / WEIGHTS_INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file():
        return find_stored(directory / WEIGHTS_FILE)
    if not index.is_file():
        raise ModelError(
            f"model: directory {str(directory)!r} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model: {str(index)!r} has no weight_map")
    files = [directory / str(name) for name in sorted(set(map(str, weight_map.values())))]
    for path in files:
        if path.parent != directory or not path.is_file():
            raise ModelError(f"model: {str(index)!r} names {path.name!r}, which is missing")
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in find_stored(path).items():
            if name in found:
                raise ModelError(
                    f"model: tensor {name!r} is both in {found[name].path.name!r} and in {path.name!r}"
                )
            found[name] = tensor
    for name, file in weight_map.items():
        if name not in found or found[name].path.name != file:
            raise ModelError(f"model: {str(index)!r} has tensor {name!r} in {file!r}, which is without it")
    return found


def find_stored(path: Path, max_header_bytes: int | None = None) -> dict[str, StoredTensor]:
    """Return where the tensors of one file lie, by name.

    Args:
        max_header_bytes: of what the file says of them, in a file that may be anybody's.

    Raises:
        ModelError: it is incomplete or damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            is_too_long = max_header_bytes is not None and length > max_header_bytes
            if not is_too_long:
                # The library checks that offsets fit shapes, types and the file's length. It does not tell them.
                with safe_open(path, framework="np"):
                    pass
                header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"model: {str(path)!r} is not a complete safetensors file: {error}") from error
    if is_too_long:
        raise ModelError(
            f"model: {str(path)!r} has a header of {length} bytes, allowed are {max_header_bytes}"
        )
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = StoredTensor(
                name, path, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"])
            )
    return tensors


class Checkpoint:
    """A checkpoint's config.json, and where its tensors lie in one or several safetensors files.

    Args:
        path: local directory or Hugging Face id.
        on_progress: told of the bytes of weights that were read.
        may_lack_weights: if there is no safetensors file, every tensor that is looked for is there, of the type that
            config.json names: for tensors without memory.

    Raises:
        ModelError: there is no such checkpoint, or its config.json is damaged. Looking for tensors also raises it where
            there is no safetensors file, or one that is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        on_progress: ProgressCallback | None,
        *,
        may_lack_weights: bool,
    ) -> None:
        self.directory = resolve_model_path(path, needs_weights=not may_lack_weights)
        self.config = read_json(self.directory / CONFIG_FILE)
        if self.config.get("quantization_config") is None and (self.directory / MODELOPT_FILE).is_file():
            fields = read_json(self.directory / MODELOPT_FILE).get("quantization")
            if not isinstance(fields, dict):
                raise ModelError(f"{MODELOPT_FILE}: quantization must be an object, got {fields!r}")
            self.config["quantization_config"] = {**fields, "quant_method": "modelopt"}
        self.on_progress = on_progress
        self.lacks_weights = may_lack_weights and not any(
            (self.directory / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE)
        )

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All by name; none where they may lack."""
        return {} if self.lacks_weights else find_tensors(self.directory)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        if self.lacks_weights:
            return self._named_dtype()
        return stored_dtype(self._find(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return self._find(name).shape

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return where a tensor is stored.

        Raises:
            ModelError: the tensor is missing, has another shape, or is of a type that cannot be read.
        """
        if self.lacks_weights:
            return StoredTensor(name, self.directory, 0, 0, "", shape)
        stored = self._find(name)
        if stored.shape != shape:
            raise ModelError(f"model: tensor {name!r} has shape {list(stored.shape)}, expected {list(shape)}")
        self.dtype_of(name)
        return stored

    def _named_dtype(self) -> torch.dtype:
        import torch

        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ModelError(f"config.json: dtype must be the name of a type, got {name!r}")
        return dtype

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ModelError(f"model: tensor {name!r} is missing from {str(self.directory)!r}")
        return self.tensors[name]
