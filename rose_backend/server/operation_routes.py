"""All routes except generation: models, tokens, health, version, metrics."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from rose_backend import __version__
from rose_backend.errors import EngineStalledError, RequestError
from rose_backend.server.answer_models import (
    DetokenizeAnswer,
    HealthAnswer,
    ModelList,
    TokenizeAnswer,
    VersionAnswer,
)
from rose_backend.server.direct_routes import DirectRoute
from rose_backend.server.error_answers import ENGINE_HAS_STOPPED, ApiError
from rose_backend.server.generation import WholeAnswer
from rose_backend.server.generation_routes import check_body, check_number, check_text_length, run_by_length
from rose_backend.server.request_models import DetokenizeRequest, TokenizeRequest
from rose_backend.server.service import Service

router = APIRouter()

_IDS_AT_ONCE = 4096
"""Token ids that are written as JSON in less than a millisecond."""
_CHARACTERS_AT_ONCE = 1 << 16
"""Characters that are."""
_MAX_TOKENS = 1 << 20
"""Tokens of a long prompt that ``/tokenize`` returns, where the window holds fewer."""


@router.get("/v1/models", responses={200: {"model": ModelList}}, tags=["models"])
async def list_models(request: Request) -> Response:
    """List the names that requests may use."""
    service: Service = request.app.state.service
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.start_time_s,
            "owned_by": "rose_backend",
            "root": service.engine.config.model,
            "max_model_len": service.engine.input_processor.max_model_len,
        }
        for name in service.settings.served_model_names
    ]
    return _json({"object": "list", "data": cards})


@router.post("/tokenize", responses={200: {"model": TokenizeAnswer}}, tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of a prompt."""
    service = check_body(request, body)
    processor = service.engine.input_processor
    check_text_length("prompt", len(body.prompt), processor)
    max_tokens = max(processor.max_model_len, _MAX_TOKENS)

    def encode() -> Response:
        token_ids = processor.encode(body.prompt, max_tokens=max_tokens)
        return _json_with_ids({"count": len(token_ids), "max_model_len": processor.max_model_len}, token_ids)

    return await run_by_length(len(body.prompt), encode)


@router.post("/detokenize", responses={200: {"model": DetokenizeAnswer}}, tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of token ids, at most as many as the model's window holds; ids of the model's vocabulary that no
    token has are left out."""
    service = check_body(request, body)
    processor = service.engine.input_processor

    def decode() -> Response:
        token_ids = read_token_ids("tokens", body.tokens, processor.max_model_len, processor.vocab_size)
        return _json_with_text(processor.tokenizer.decode(token_ids, skip_special_tokens=False))

    return await run_by_length(len(body.tokens) if isinstance(body.tokens, list) else 0, decode)


DIRECT_ROUTES: dict[str, DirectRoute] = {
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
}


@router.get("/health", responses={200: {"model": HealthAnswer}}, tags=["operations"])
async def health(request: Request) -> Response:
    """Report whether requests are served: 503 after a failure of the engine, while it does not answer, and while
    shutting down."""
    service: Service = request.app.state.service
    if service.is_draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    if not service.engine.is_running:
        raise ApiError(503, ENGINE_HAS_STOPPED, code="engine_dead")
    if service.engine_is_stalled:
        raise EngineStalledError
    return _json({"status": "ok"})


@router.get("/version", responses={200: {"model": VersionAnswer}}, tags=["operations"])
async def version() -> Response:
    """Return the version of rose_backend."""
    return _json({"version": __version__})


@router.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    tags=["operations"],
)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    service: Service = request.app.state.service
    counters = await service.engine.counters()
    return Response(service.metrics.render(counters), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _json_with_ids(answer: Mapping[str, object], token_ids: list[int]) -> Response:
    """Return ``answer`` with a list that may be long: encoded in one call, it would hold the interpreter lock."""
    pieces = [f'{json.dumps(answer)[:-1]}, "tokens": ['.encode()]
    for first in range(0, len(token_ids), _IDS_AT_ONCE):
        separator = ", " if first else ""
        pieces.append((separator + json.dumps(token_ids[first : first + _IDS_AT_ONCE])[1:-1]).encode())
    return WholeAnswer([*pieces, b"]}"])


def _json_with_text(text: str) -> Response:
    parts = (text[first : first + _CHARACTERS_AT_ONCE] for first in range(0, len(text), _CHARACTERS_AT_ONCE))
    return WholeAnswer([b'{"prompt": "', *(json.dumps(part)[1:-1].encode() for part in parts), b'"}'])


def _json(answer: object) -> Response:
    return Response(json.dumps(answer).encode(), media_type="application/json")


def read_token_ids(field: str, value: Any, max_number: int, vocab_size: int) -> list[int]:
    """Return a list of token ids, whose length has been checked before its elements.

    Raises:
        RequestError: it is no list of ids of the vocabulary, or too long.
    """
    if not isinstance(value, list):
        raise RequestError(
            f"{field}: got {reprlib.repr(value)}, allowed is a list of token ids", parameter=field
        )
    check_number(field, len(value), "token ids", max_number)
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) < vocab_size:
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}.{index}: got {reprlib.repr(token_id)}, allowed are integers from 0 to {vocab_size - 1}",
                parameter=f"{field}.{index}",
            )
    return value
