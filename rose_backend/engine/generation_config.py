"""generation_config.json: which tokens end a text, and how a model's makers sample where a caller does not say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rose_backend.config import EngineConfig
from rose_backend.engine.input_processor import InputProcessor, ProcessedInput
from rose_backend.engine.request import Prompt
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import ModelError, RequestError
from rose_backend.models.weights import read_eos_token_ids, read_json, resolve_model_path

GENERATION_CONFIG_FILE = "generation_config.json"
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What parameters are where a caller leaves them open."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ``SamplingParams``, ``max_tokens`` left out."""
    max_new_tokens: int | None = None
    """Limit of answers without one, capped by the window; None: that of ``SamplingParams``."""

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a caller who says nothing."""
        fields = dict(self.fields)
        if self.max_new_tokens is not None:
            fields["max_tokens"] = self.max_new_tokens
        return SamplingParams(**fields)

    def process_all(self, processor: InputProcessor, prompts: Sequence[Prompt]) -> list[ProcessedInput]:
        """Process prompts of a caller who says nothing; errors are those of ``InputProcessor.process``."""
        params = self.sampling_params()
        if self.max_new_tokens is not None:
            params = replace(params, max_tokens=None)
        processed = processor.process_all(prompts, [params] * len(prompts))
        return [processor.with_limit(each, self.max_new_tokens) for each in processed]

    def __str__(self) -> str:
        limit = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return json.dumps({**self.fields, **limit})


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """Return a model's sampling parameters; with ``generation_config`` off those of ``SamplingParams``.

    As in vLLM ``do_sample`` is not looked at: ``temperature`` alone says whether to draw.

    Raises:
        ModelError: there is no such model, or its file has a value that is not allowed.
    """
    if config.generation_config == "none":
        return SamplingDefaults()
    fields = _read(resolve_model_path(config.model))
    given = {name: fields[name] for name in _SAMPLING_FIELDS if fields.get(name) is not None}
    defaults = SamplingDefaults(given, fields.get("max_new_tokens"))
    try:
        defaults.sampling_params()
    except RequestError as error:
        raise ModelError(
            f"{GENERATION_CONFIG_FILE}: {error}; --generation-config none ignores its sampling parameters"
        ) from error
    return defaults


def generation_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end tokens that the file names beside those of config.json, whatever ``generation_config`` says.

    Raises:
        ModelError: they are no token ids.
    """
    return read_eos_token_ids(_read(directory), GENERATION_CONFIG_FILE)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG_FILE
    return read_json(path) if path.is_file() else {}
