"""What answers look like, for /openapi.json. The server itself never builds these: see ``answers``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Exact(BaseModel):
    """No fields but those named."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Exact):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Exact):
    """Every answer with a status of 400 or above."""

    error: ErrorDetail


class PromptTokensDetails(Exact):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(Exact):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Exact):
    """Log-probabilities, one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Exact):
    """One completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None


class CompletionAnswerModel(Exact):
    """Answer of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Exact):
    """One candidate."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob]


class AnswerMessage(Exact):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Exact):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None


class ChatAnswerModel(Exact):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(Exact):
    """One served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Exact):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Exact):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Exact):
    """Answer of ``POST /detokenize``."""

    prompt: str


class HealthAnswer(Exact):
    """Answer of ``GET /health``."""

    status: Literal["ok"]


class VersionAnswer(Exact):
    """Answer of ``GET /version``."""

    version: str
