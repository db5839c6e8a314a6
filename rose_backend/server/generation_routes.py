"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import reprlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from rose_backend.engine.input_processor import InputProcessor, ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import EngineDeadError, RequestError
from rose_backend.server.answer_models import ChatAnswerModel, CompletionAnswerModel
from rose_backend.server.answers import DONE_EVENT, Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.chat_template import plain_messages
from rose_backend.server.direct_routes import DirectRoute
from rose_backend.server.error_answers import ApiError, as_api_error
from rose_backend.server.generation import ClientWatch, EventStream, Generation, PromptOutput, events_message
from rose_backend.server.request_models import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    check_other_fields,
)
from rose_backend.server.service import RequestRecord, Service

router = APIRouter()
T = TypeVar("T")

_MAX_INLINE_LENGTH = 8192
"""Characters and token ids that are processed on the event loop; more are in a thread, to not delay streams."""

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
    namespace = service.namespaces.namespace(request.headers, body.cache_salt)
    params = body.sampling_params(service.sampling_defaults.fields)
    processor = service.engine.input_processor
    prompts = read_prompts(body.prompt, service.settings.max_prompts, processor.max_model_len)
    inputs = await process_prompts(processor, prompts, params, namespace)

    def echo(index: int) -> str:
        text, ids = inputs[index].prompt, inputs[index].token_ids
        return processor.tokenizer.decode(ids.tolist(), skip_special_tokens=False) if text is None else text

    options = answer_options(request, body, params.n, "cmpl")
    answer = CompletionAnswer(options, echo=echo if body.echo else None)
    return await generate(request, inputs, answer, is_streaming=bool(body.stream))


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatAnswerModel, "content": _EVENTS}}, tags=["generate"]
)
async def chat(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    service = check_body(request, body)
    namespace = service.namespaces.namespace(request.headers, body.cache_salt)
    params = body.sampling_params(service.sampling_defaults.fields)
    processor = service.engine.input_processor
    template = service.chat_template
    template.check_available()
    messages = plain_messages(body.messages)
    num_characters = sum(len(message["content"]) for message in messages)
    check_text_length("messages", num_characters, processor)
    adds_start = body.add_generation_prompt is not False

    def process() -> list[ProcessedInput]:
        ids = template.encode(messages, add_generation_prompt=adds_start)
        processed = processor.process_all([ids], [params], namespace)
        return [processor.with_limit(each, service.sampling_defaults.max_new_tokens) for each in processed]

    inputs = await run_by_length(num_characters, process)
    options = answer_options(request, body, params.n, "chatcmpl")
    answer = ChatAnswer(options, num_top_logprobs=body.top_logprobs or 0)
    return await generate(request, inputs, answer, is_streaming=bool(body.stream))


DIRECT_ROUTES: dict[str, DirectRoute] = {
    "/v1/completions": (CompletionRequest, complete),
    "/v1/chat/completions": (ChatCompletionRequest, chat),
}


def check_body(request: Request, body: Body) -> Service:
    """Check the model's name and the fields unknown to the body's model; return the service.

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


def answer_options(request: Request, body: GenerationRequest, n: int, prefix: str) -> AnswerOptions:
    """Return what the answer takes over; its id is ``prefix`` and the request's."""
    service: Service = request.app.state.service
    return AnswerOptions(
        id=f"{prefix}-{request.state.record.request_id}",
        created=int(time.time()),
        model=service.model_name,
        n=n,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        hit_unit=service.hit_unit,
    )


async def generate(
    request: Request, inputs: list[ProcessedInput], answer: Answer, *, is_streaming: bool
) -> Response:
    """Run the prompts and answer, whole or as a stream; abort them when the client disconnects.

    A stream's status is sent with its first token, so that a refusal can still have a status of its own.

    Raises:
        ClientDisconnect: the client disconnected before the answer began.
        RequestError: the queue is full.
        EngineDeadError: the engine failed.
    """
    record: RequestRecord = request.state.record
    outputs = Generation(request.app.state.service, record, inputs).outputs()
    watch = ClientWatch(request.receive)
    try:
        async with watch:
            if is_streaming:
                first = await anext(outputs)
                send_events = partial(_send_events, first, outputs, answer, record, len(inputs))
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
    """Send the events of every output, beginning with ``first``."""
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
    # The last events and the end of the answer are one message, and one system call.
    await send(events_message(events, is_last=True))


def read_prompts(value: Any, max_prompts: int, max_model_len: int) -> list[str | list[int]]:
    """Return the prompts of a completion request, each as text or as token ids.

    Lengths are checked before elements, so that millions of them cannot block the event loop. ``InputProcessor`` checks
    token ids.

    Raises:
        RequestError: it is neither a prompt nor a list of them, or there are too many.
    """
    prompts: list[str | list[int]] = []
    if isinstance(value, str):
        prompts = [value]
    elif isinstance(value, list) and value:
        kind = type(value[0])
        if kind in (str, list):
            check_number("prompt", len(value), "prompts", max_prompts)
        is_too_long = kind is int and len(value) >= max_model_len
        if is_too_long or (kind in (int, str, list) and set(map(type, value)) == {kind}):
            prompts = [value] if kind is int else value
    if not prompts:
        raise RequestError(
            f"prompt: got {reprlib.repr(value)}, allowed are a string, a list of token ids, a list of strings and "
            "a list of lists of token ids",
            parameter="prompt",
        )
    return prompts


def check_number(field: str, number: int, what: str, limit: int) -> None:
    """Raise RequestError if ``number`` of ``what`` is more than ``limit``."""
    if number > limit:
        raise RequestError(f"{field}: got {number} {what}, allowed are at most {limit}", parameter=field)


async def process_prompts(
    processor: InputProcessor, prompts: list[str | list[int]], params: SamplingParams, namespace: bytes
) -> list[ProcessedInput]:
    """Tokenize and check the prompts of one request.

    Raises:
        RequestError: a text is longer than any text that fits the model's window, or see ``InputProcessor.process``.
    """
    check_text_length(
        "prompt", max((len(each) for each in prompts if isinstance(each, str)), default=0), processor
    )
    return await run_by_length(
        sum(map(len, prompts)),
        lambda: processor.process_all(prompts, [params] * len(prompts), namespace),
    )


def check_text_length(field: str, num_characters: int, processor: InputProcessor) -> None:
    """Raise RequestError if a text is longer than a window full of the longest token, before it is tokenized."""
    max_model_len, max_token_length = processor.max_model_len, processor.tokenizer.max_token_length
    limit = max_model_len * max_token_length
    if num_characters > limit:
        raise RequestError(
            f"{field}: got {num_characters} characters, allowed are at most {limit} (a window of {max_model_len} "
            f"tokens, none longer than {max_token_length} characters)",
            parameter=field,
        )


async def run_by_length(length: int, work: Callable[[], T]) -> T:
    """Do the work here, or in a thread if there are many characters or token ids."""
    return work() if length <= _MAX_INLINE_LENGTH else await asyncio.to_thread(work)
