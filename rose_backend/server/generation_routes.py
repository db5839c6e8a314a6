"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import reprlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from rose_backend.engine.input_processor import InputProcessor, ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import EngineDeadError, GenerationError, RequestError
from rose_backend.server.answer_models import ChatAnswerModel, CompletionAnswerModel
from rose_backend.server.answers import DONE_EVENT, Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.chat_template import plain_messages
from rose_backend.server.direct_routes import DirectRoute
from rose_backend.server.error_answers import ApiError, as_api_error
from rose_backend.server.generation import (
    ClientWatch,
    EventStream,
    Generation,
    PromptOutput,
    WholeAnswer,
    events_message,
)
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
_LENGTH_OF_EACH = 128
"""So many characters take as long as what is done for each prompt and message beside its text."""

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
    prompts: list[str | list[int]] | None
    prompts = read_prompts(body.prompt, service.settings.max_prompts, processor.max_model_len)
    inputs, length = await process_prompts(processor, prompts, params, namespace), length_of(prompts)
    # The request may wait for long, and a list of token ids takes ten times the memory of an array.
    body.prompt = prompts = None
    echo = None
    if body.echo:
        echo = await run_by_length(length, lambda: [text_of(each, processor) for each in inputs])
    check_answer_tokens(inputs, echo, service)
    answer = CompletionAnswer(answer_options(request, body, params.n, "cmpl"), echo=echo)
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
    length = length_of([text for message in messages for text in message.values()])
    check_text_length("messages", sum(len(message["content"]) for message in messages), processor)
    adds_start = body.add_generation_prompt is not False

    def process() -> list[ProcessedInput]:
        # A template may show a text more than once.
        text = template.render(
            messages, add_generation_prompt=adds_start, max_length=max_text_length(processor)
        )
        ids = processor.encode(text, max_tokens=processor.max_model_len - 1, add_special_tokens=False)
        processed = processor.process_all([ids], [params], namespace)
        return [processor.with_limit(each, service.sampling_defaults.max_new_tokens) for each in processed]

    inputs = await run_by_length(length, process)
    check_answer_tokens(inputs, None, service)
    options = answer_options(request, body, params.n, "chatcmpl")
    token_bytes = processor.tokenizer.token_texts.bytes_of
    answer = ChatAnswer(options, token_bytes=token_bytes, num_top_logprobs=body.top_logprobs or 0)
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
        GenerationError: it could not go on with this request.
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
                for _ in answer.keep(index, output):
                    await asyncio.sleep(0)
                # Outputs that wait already make no turn of the event loop by themselves.
                await asyncio.sleep(0)
            pieces = []
            for piece in answer.body():
                pieces.append(piece)
                await asyncio.sleep(0)
        watch.close()
        return WholeAnswer(pieces)
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
            last = await _send_but_last(answer.events(index, output), send)
            await send(events_message(last))
            index, output = await anext(outputs)
            num_unfinished -= output.finished
        events = await _send_but_last(answer.events(index, output), send) + answer.end_events()
    except (RequestError, EngineDeadError, GenerationError) as error:
        record.error = str(error)
        events = as_api_error(error).event() + DONE_EVENT
    # The last events and the end of the answer are one message, and one system call.
    await send(events_message(events, is_last=True))


async def _send_but_last(pieces: Iterator[bytes], send: Send) -> bytes:
    """Send all pieces but the last one, each in a turn of the event loop of its own; return the last one, if any."""
    last = next(pieces, b"")
    for piece in pieces:
        await send(events_message(last))
        await asyncio.sleep(0)
        last = piece
    return last


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
        length_of(prompts),
        lambda: processor.process_all(prompts, [params] * len(prompts), namespace),
    )


def check_text_length(field: str, num_characters: int, processor: InputProcessor) -> None:
    """Raise RequestError if a text is longer than a window full of the longest token, before it is tokenized."""
    limit = max_text_length(processor)
    if num_characters > limit:
        raise RequestError(
            f"{field}: got {num_characters} characters, allowed are at most {limit} (a window of "
            f"{processor.max_model_len} tokens, none longer than {processor.tokenizer.max_token_length} characters)",
            parameter=field,
        )


def max_text_length(processor: InputProcessor) -> int:
    """Return the characters of a window full of the longest token."""
    return processor.max_model_len * processor.tokenizer.max_token_length


def check_answer_tokens(inputs: list[ProcessedInput], echo: list[str] | None, service: Service) -> None:
    """Check how much one answer may become. A single completion is bounded by the window.

    Args:
        inputs: of one request, with the same parameters but for ``max_tokens``.
        echo: text in front of the completions of each.

    Raises:
        RequestError: all completions together may have more tokens and log-probabilities than one request may ask for.
    """
    limit, max_model_len = service.settings.max_answer_tokens, service.engine.input_processor.max_model_len
    n, num_logprobs = inputs[0].params.n, inputs[0].params.logprobs or 0
    if len(inputs) * n == 1:
        return
    limits = (each.params.max_tokens or max_model_len - len(each.token_ids) for each in inputs)
    num_tokens = n * sum(limits) * (1 + num_logprobs) + n * sum(map(len, echo or ()))
    if num_tokens > limit:
        raise RequestError(
            f"max_tokens: got up to {num_tokens} tokens in {len(inputs) * n} completions, each counted once and once "
            f"more for each of its {num_logprobs} log-probabilities, echoed characters included; allowed are at most "
            f"{limit} in one request (--max-answer-tokens)",
            parameter="max_tokens",
        )


def text_of(processed: ProcessedInput, processor: InputProcessor) -> str:
    """Return the text of a prompt, which may have come as token ids."""
    if processed.prompt is not None:
        return processed.prompt
    return processor.tokenizer.decode(processed.token_ids.tolist(), skip_special_tokens=False)


def length_of(texts: Sequence[str | list[int]]) -> int:
    """Return a measure for how long it takes to process texts or lists of token ids."""
    return sum(map(len, texts)) + _LENGTH_OF_EACH * len(texts)


async def run_by_length(length: int, work: Callable[[], T]) -> T:
    """Do the work here, or in a thread if there are many characters or token ids."""
    return work() if length <= _MAX_INLINE_LENGTH else await asyncio.to_thread(work)
