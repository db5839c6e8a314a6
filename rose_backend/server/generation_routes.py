"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from rose_backend.engine.request_factory import check_cache_salt
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import EngineDeadError, RequestError
from rose_backend.server.answer_models import ChatAnswerModel, CompletionAnswerModel
from rose_backend.server.answers import DONE_EVENT, Answer, AnswerHead, ChatAnswer, CompletionAnswer
from rose_backend.server.chat_template import plain_messages
from rose_backend.server.direct_routes import DirectRoute
from rose_backend.server.error_answers import ApiError, as_api_error
from rose_backend.server.event_stream import ClientWatch, EventStream, events_message
from rose_backend.server.generation import Generation, PromptOutput
from rose_backend.server.other_fields import check_other_fields
from rose_backend.server.prompts import (
    check_text_length,
    encode_prompts,
    read_prompts,
    run_by_length,
    sampling_params,
)
from rose_backend.server.request_models import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from rose_backend.server.request_record import RequestRecord
from rose_backend.server.service import Service

router = APIRouter()

# Of each event; its data is JSON, or [DONE].
_EVENT_SCHEMA = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_EVENTS = {"text/event-stream": {"schema": _EVENT_SCHEMA}}


@router.post(
    "/v1/completions",
    responses={200: {"model": CompletionAnswerModel, "content": _EVENTS}},
    tags=["generate"],
)
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or several."""
    service = check_body(request, body)
    cache_salt = engine_salt(service, request, body)
    params = sampling_params(body)
    tokenizer, max_model_len = service.engine.tokenizer, service.engine.max_model_len
    prompts = read_prompts(body.prompt, service.settings.max_prompts, max_model_len)
    prompt_ids = await encode_prompts(prompts, tokenizer, max_model_len)

    def echo(index: int) -> str:
        prompt = prompts[index]
        return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)

    answer = CompletionAnswer(
        make_head(service, request, "cmpl"),
        n=params.n,
        include_usage=wants_usage(body),
        hit_unit=service.hit_unit,
        echo=echo if body.echo else None,
    )
    return await generate(
        request, prompt_ids, params, answer, cache_salt=cache_salt, is_streaming=bool(body.stream)
    )


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatAnswerModel, "content": _EVENTS}}, tags=["generate"]
)
async def chat(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    service = check_body(request, body)
    cache_salt = engine_salt(service, request, body)
    params = sampling_params(body)
    template = service.chat_template
    template.check_available()
    messages = plain_messages(body.messages)
    num_characters = sum(len(message["content"]) for message in messages)
    check_text_length("messages", num_characters, service.engine.tokenizer, service.engine.max_model_len)
    adds_start = body.add_generation_prompt is not False
    prompt_ids = await run_by_length(
        num_characters, lambda: template.encode(messages, add_generation_prompt=adds_start)
    )
    answer = ChatAnswer(
        make_head(service, request, "chatcmpl"),
        n=params.n,
        include_usage=wants_usage(body),
        hit_unit=service.hit_unit,
        num_top_logprobs=body.top_logprobs or 0,
    )
    return await generate(
        request, [prompt_ids], params, answer, cache_salt=cache_salt, is_streaming=bool(body.stream)
    )


DIRECT_ROUTES: dict[str, DirectRoute] = {
    "/v1/completions": (CompletionRequest, complete),
    "/v1/chat/completions": (ChatCompletionRequest, chat),
}


def check_body(request: Request, body: Body) -> Service:
    """Check the model's name and the fields that the body's model does not have; return the service.

    Raises:
        ApiError: 404, the model is not served here.
        RequestError: see ``check_other_fields``.
    """
    service: Service = request.app.state.service
    names = service.settings.served_model_names
    if body.model is not None and body.model not in names:
        raise ApiError(
            404,
            f"model: got {body.model[:200]!r}, allowed here: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    check_other_fields(body)
    return service


def make_head(service: Service, request: Request, kind: str) -> AnswerHead:
    """Return the fields that every part of the answer repeats; its id holds the request's."""
    record: RequestRecord = request.state.record
    return AnswerHead(f"{kind}-{record.request_id}", int(time.time()), service.model_name)


def wants_usage(body: GenerationRequest) -> bool:
    """Return whether a stream ends with token counts."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def engine_salt(service: Service, request: Request, body: GenerationRequest) -> str | None:
    """Return the salt under which the engine caches the request.

    Raises:
        RequestError: see ``check_cache_salt``.
    """
    check_cache_salt(body.cache_salt)
    return service.namespaces.engine_salt(request.headers, body.cache_salt)


async def generate(
    request: Request,
    prompts: list[list[int]],
    params: SamplingParams,
    answer: Answer,
    *,
    cache_salt: str | None,
    is_streaming: bool,
) -> Response:
    """Run the prompts and answer, whole or as a stream; give up when the client leaves.

    A stream's status is sent with its first token, so that a refusal still has a status of its own.

    Raises:
        ClientDisconnect: the client left before the answer began.
        RequestError: a prompt or a parameter is not allowed, or the queue is full.
        EngineDeadError: the engine failed.
    """
    record: RequestRecord = request.state.record
    outputs = Generation(request.app.state.service, record, prompts, params, cache_salt).outputs()
    watch = ClientWatch(request.receive)
    try:
        async with watch:
            if is_streaming:
                first = await anext(outputs)
                send_events = partial(_send_events, first, outputs, answer, record, len(prompts))
                return EventStream(outputs, send_events, watch, record)
            async for index, output in outputs:
                answer.keep(index, output)
        watch.close()
        return Response(answer.body(), media_type="application/json")
    except BaseException:
        watch.close()
        await outputs.aclose()
        raise


async def _send_events(
    first: PromptOutput,
    outputs: AsyncGenerator[PromptOutput, None],
    answer: Answer,
    record: RequestRecord,
    num_unfinished: int,
    send: Send,
) -> None:
    """Send the events of every output, the first of which is here already."""
    try:
        index, output = first
        num_unfinished -= output.finished
        while num_unfinished:
            await send(events_message(answer.events(index, output)))
            index, output = await anext(outputs)
            num_unfinished -= output.finished
        events = answer.events(index, output) + answer.end_events()
    except (RequestError, EngineDeadError) as error:
        record.error = str(error)
        events = as_api_error(error).event() + DONE_EVENT
    # An answer's last events and its end are one message, and one system call.
    await send(events_message(events, is_last=True))
