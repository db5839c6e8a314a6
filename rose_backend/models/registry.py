"""Which model class serves a checkpoint."""

from __future__ import annotations

from pathlib import Path

from rose_backend.config import Switches
from rose_backend.errors import ModelError
from rose_backend.models.gpt2 import GPT2
from rose_backend.models.weight_loading import CONFIG_FILE, read_json, resolve_model_path

MODEL_CLASSES: dict[str, type[GPT2]] = {"GPT2LMHeadModel": GPT2}


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    switches: Switches | None = None,
) -> GPT2:
    """Load the model that a checkpoint's config.json asks for.

    Args:
        path: local directory or Hugging Face id.
        dtype: ``auto`` is float32 on a CPU, the checkpoint's own type elsewhere; for float32 bfloat16, as in vLLM.
        device: ``cpu`` or ``cuda``.
        switches: None has everything on.

    Raises:
        ModelError: the checkpoint is missing, damaged, or of an architecture that is not supported.
    """
    directory = resolve_model_path(path)
    architectures = read_json(directory / CONFIG_FILE).get("architectures") or []
    for name in architectures:
        if name in MODEL_CLASSES:
            return MODEL_CLASSES[name].load(
                directory, dtype=dtype, device=device, switches=switches or Switches()
            )
    raise ModelError(
        f"model: {str(path)!r} is of architecture {', '.join(map(str, architectures)) or 'unknown'},"
        f" supported are {', '.join(MODEL_CLASSES)}"
    )
