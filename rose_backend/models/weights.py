"""Finding and reading Hugging Face checkpoints: config.json and safetensors files.

Every way in which a checkpoint can be missing or damaged ends in a ``ModelError`` of one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from rose_backend.errors import ModelError

if TYPE_CHECKING:
    # Only looking for a checkpoint or reading its tokenizer must not wait for torch.
    import torch

    from rose_backend.layers.linear import Linear, Norm
    from rose_backend.models.config import ModelConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
HEAD_ALIGNMENT = 64
"""Rows of the LM head are padded to a multiple of this: on a GPU, products of an unaligned width such as GPT-2's 50,257
are several times slower."""

_Result = TypeVar("_Result")

_HUB_FILES = ["*.json", "*.safetensors", "merges.txt", "vocab.txt", "*.model", "*.jinja"]
_HUB_PATTERNS: dict[str, Any] = {
    "allow_patterns": _HUB_FILES,
    # Mistral's and Llama's own copies of the weights, beside those that are read.
    "ignore_patterns": ["consolidated*", "original/*"],
}
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

    # The cache first: a cached model must load without a network.
    try:
        cached = Path(snapshot_download(name, local_files_only=True, **_HUB_PATTERNS))
        if (cached / CONFIG_FILE).is_file() and any(cached.glob("*.safetensors")):
            return cached
    except (OSError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, etag_timeout=_HUB_TIMEOUT_S, **_HUB_PATTERNS))
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


class Checkpoint:
    """A checkpoint's config.json, and its tensors in one or several safetensors files, read one by one.

    Args:
        path: local directory or Hugging Face id.

    Raises:
        ModelError: there is no such checkpoint, or its config.json is damaged. Reading tensors also raises it where
            there is no safetensors file, or one that is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.directory = resolve_model_path(path)
        self.config = read_json(self.directory / CONFIG_FILE)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        return self._open(name, lambda tensors: tensors.get_slice(name)[:0].dtype)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a private copy of one tensor.

        Raises:
            ModelError: the tensor is missing, has another shape, or its file is damaged.
        """

        def copy(tensors: Any) -> torch.Tensor:
            tensor: torch.Tensor = tensors.get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"model: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
                )
            # Not a view of the mapped file, which is badly aligned and may be replaced while the engine runs.
            return tensor.clone()

        return self._open(name, copy)

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        file_of: dict[str, Path] = {}
        for path in _weight_files(self.directory):
            try:
                with safe_open(path, framework="pt") as file:
                    file_of.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return file_of

    def _open(self, name: str, use: Callable[[Any], _Result]) -> _Result:
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"model: tensor {name!r} is missing from {str(self.directory)!r}")
        try:
            with safe_open(path, framework="pt") as file:
                return use(file)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads a model's tensors in its type, onto its device. All methods raise what ``Checkpoint.read`` raises."""

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str
    """Of all names but ``HEAD``."""
    taken: set[str] = field(default_factory=set)
    """Names of tensors that were read, prefix included."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor."""
        return self._convert(self._read(self.prefix + name, shape))

    def norm(self, name: str) -> Norm:
        """Return a LayerNorm over the hidden size."""
        from rose_backend.layers.linear import Norm

        width = self.config.hidden_size
        return Norm(
            self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width), self.config.norm_eps
        )

    def linear(self, name: str, fan_in: int, fan_out: int) -> Linear:
        """Return a linear layer with a bias, whose matrix is stored as [fan_in, fan_out]."""
        from rose_backend.layers.linear import Linear

        return Linear(self.tensor(f"{name}.weight", fan_in, fan_out), self.tensor(f"{name}.bias", fan_out))

    def rms_norm(self, name: str) -> Norm:
        """Return an RMSNorm over the hidden size."""
        from rose_backend.layers.linear import Norm

        return Norm(self.tensor(f"{name}.weight", self.config.hidden_size), None, self.config.norm_eps)

    def joined(self, fan_in: int, fan_outs: Mapping[str, int], *, has_bias: bool = False) -> Linear:
        """Return linear layers of one input as one, outputs side by side; matrices are stored as [fan_out, fan_in].

        Args:
            fan_outs: by name, in order.
            has_bias: each has one.
        """
        import torch

        from rose_backend.layers.linear import Linear

        matrices = [self.tensor(f"{name}.weight", fan_out, fan_in) for name, fan_out in fan_outs.items()]
        biases = [self.tensor(f"{name}.bias", fan_out) for name, fan_out in fan_outs.items() if has_bias]
        return Linear(torch.cat(matrices).t(), torch.cat(biases) if has_bias else None)

    def check_all_read(self, *, unused_suffixes: Collection[str] = ()) -> None:
        """Check that no tensor of the checkpoint was left out: it would be one that the model should compute with.

        Args:
            unused_suffixes: ends of names that no computation needs.
        """
        left = [
            name
            for name in self.checkpoint
            if name not in self.taken and not name.endswith(tuple(unused_suffixes))
        ]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"model: tensor {min(left)!r}{others} would not be used; config.json does not fit"
            )

    def embedding_and_head(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token embedding ``name``, [V, E], and the LM head with rows of padding behind it, [V', E].

        Where the two are tied, the embedding is a part of the head.

        Raises:
            ModelError: also where both are stored, are tied, and differ.
        """
        from torch.nn.functional import pad

        checkpoint, config = self.checkpoint, self.config
        shape, padding = (
            (config.vocab_size, config.hidden_size),
            (0, 0, 0, -config.vocab_size % HEAD_ALIGNMENT),
        )
        stored = self._read(self.prefix + name, shape)
        embedding = head = self._convert(pad(stored, padding))
        if not config.tie_word_embeddings:
            head = self._convert(pad(self._read(HEAD, shape), padding))
        elif HEAD in checkpoint and not self._read(HEAD, shape).equal(stored):
            raise ModelError(f"config.json: tie_word_embeddings is on, but {HEAD} differs from {name}")
        return embedding[: config.vocab_size], head

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.taken.add(name)
        return self.checkpoint.read(name, shape)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.config.device, dtype=self.config.dtype)


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
