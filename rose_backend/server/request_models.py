"""Bodies of requests, as pydantic models: they check types and ranges, and describe the API in /openapi.json.

``null`` means the same as leaving a field out, but for ``max_tokens``, where it fills the model's window. Ranges are
those of ``SamplingParams``, which checks once more what no single field can tell.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.types import FailFast

from rose_backend.config import (
    MAX_CACHE_SALT_LENGTH,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from rose_backend.server.settings import MAX_MESSAGES, MAX_PARTS

_MAX_INT32 = 2**31 - 1
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
# A union over long lists would collect an error per element and branch; ``read_prompts`` looks at it instead.
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "title": "Prompt",
            "description": "A prompt as text or token ids, or a list of such prompts.",
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ],
        }
    ),
]


class Body(BaseModel):
    """What all bodies share: no conversions, and unknown fields are kept for ``check_other_fields``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    """Send token counts in a last event."""
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(Body):
    """Fields that completions and chat completions share. The second half are vLLM's additions to OpenAI's."""

    n: int | None = Field(None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)

    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT32)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT32)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)
    """Only requests with the same salt, and the same API key, share cached prefixes."""


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TextPart(BaseModel):
    """One part of a message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    name: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the start of the assistant's answer; true unless given."""
    add_special_tokens: Literal[False] | None = None
    """The chat template writes all special tokens."""


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``."""

    prompt: str


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    tokens: Annotated[Any, WithJsonSchema({"title": "Tokens", **_TOKEN_IDS, "minItems": 0})]
    """``read_token_ids`` looks at it: how many there may be depends on the model."""
