"""Where each tensor of a checkpoint lies in its safetensors files, checked without reading a tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rose_backend.errors import ModelError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"


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


def has_weights(directory: Path) -> bool:
    """Whether there is anything that ``find_tensors`` would look into."""
    return (directory / WEIGHTS_FILE).is_file() or (directory / WEIGHTS_INDEX_FILE).is_file()


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name.

    Raises:
        ModelError: a file is missing, incomplete or damaged, two files have a tensor of one name, or a tensor is not
            in the file that the index says.
    """
    index = directory / WEIGHTS_INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file():
        return _tensors_of(directory / WEIGHTS_FILE)
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
        for name, tensor in _tensors_of(path).items():
            if name in found:
                raise ModelError(
                    f"model: tensor {name!r} is both in {found[name].path.name!r} and in {path.name!r}"
                )
            found[name] = tensor
    for name, file in weight_map.items():
        if name not in found or found[name].path.name != file:
            raise ModelError(f"model: {str(index)!r} has tensor {name!r} in {file!r}, which is without it")
    return found


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    try:
        # The library checks that offsets fit shapes, types and the file's length. It does not tell them.
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"model: {str(path)!r} is not a complete safetensors file: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = StoredTensor(
                name, path, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"])
            )
    return tensors
