"""Models of all answers, for /openapi.json. The server does not build these: see ``answers``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Exact(BaseModel):
    """No fields but those named."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Exact):
    """OpenAI's error object."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Exact):
    """Every answer with a status of 400 or above."""

    error: ErrorDetail


class PromptTokensDetails(Exact):
    """How many prompt tokens were cached."""

    cached_tokens: int


class Usage(Exact):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(Exact):
    """One completion of one prompt."""

    index: int
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None


class Answer(Exact):
    """Fields of every answer with completions."""

    id: str
    created: int
    model: str
    usage: Usage


class CompletionLogprobs(Exact):
    """Log-probabilities, one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None]]


class CompletionChoice(Choice):
    """One completion of one prompt."""

    text: str
    logprobs: CompletionLogprobs | None


class CompletionAnswerModel(Answer):
    """Answer of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(Exact):
    """One candidate."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob]


class AnswerMessage(Exact):
    """The model's answer."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatAnswerModel(Answer):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


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
