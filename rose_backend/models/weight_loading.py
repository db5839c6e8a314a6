"""Finding and reading Hugging Face checkpoints: config.json and safetensors files.

Every way in which a checkpoint can be missing or damaged ends in a ``ModelError`` of one sentence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rose_backend.errors import ModelError

if TYPE_CHECKING:
    # What only looks for a checkpoint or reads its tokenizer does not wait for it.
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_HUB_FILES = ["*.json", "*.safetensors", "merges.txt", "vocab.txt", "*.model"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 5.0


def resolve_model_path(model: str | Path) -> Path:
    """Return the local directory of a checkpoint, downloading it when ``model`` is a Hugging Face id not in the cache.

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
    return _resolve_hub_id(name)


def _resolve_hub_id(name: str) -> Path:
    from huggingface_hub import snapshot_download

    # The cache first: a start must not depend on the network when everything is here already.
    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=_HUB_FILES))
        if (cached / CONFIG_FILE).is_file() and any(cached.glob("*.safetensors")):
            return cached
    except (OSError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
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
    except (OSError, ValueError) as error:
        raise ModelError(f"model: cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model: {str(path)!r} holds a {type(content).__name__}, a JSON object is needed")
    return content


class CheckpointTensors:
    """The tensors of a checkpoint, in one or several safetensors files, read one by one.

    Raises:
        ModelError: no safetensors file, or one that is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(directory):
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a private copy of one tensor.

        Raises:
            ModelError: the tensor is missing, has another shape, or its file is damaged.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"model: tensor {name!r} is missing from {str(self.directory)!r}")
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"model: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
                    )
                # Not a view of the mapped file, which is badly aligned and may be replaced while we run.
                return tensor.clone()
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error


def _weight_files(directory: Path) -> list[Path]:
    single = directory / WEIGHTS_FILE
    if single.is_file():
        return [single]
    index = directory / WEIGHTS_INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"model: directory {str(directory)!r} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model: {str(index)!r} has no weight_map")
    files = [directory / str(name) for name in sorted(set(weight_map.values()))]
    for path in files:
        if path.parent != directory or not path.is_file():
            raise ModelError(f"model: {str(index)!r} names {path.name!r}, which is missing")
    return files


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"model: {str(path)!r} is not a complete safetensors file: {error}")
