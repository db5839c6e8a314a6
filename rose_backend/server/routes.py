"""The routes of the API, and the checks of what their bodies ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import reprlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from rose_backend import __version__
from rose_backend.engine.request import MAX_CUT_TOKENS, InputProcessor, ProcessedInput
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.errors import EngineStalledError
from rose_backend.server.adapters import ServedAdapter
from rose_backend.server.answer_parsers import (
    END_OF_REASONING,
    MAKE_TOOL_CALL_PARSER,
    AnswerParser,
    NamedCallParser,
    PlainParser,
    ReasoningParser,
    RequiredCallsParser,
)
from rose_backend.server.answers import (
    MAKE_CALL_ID,
    Answer,
    AnswerOptions,
    ChatAnswer,
    CompletionAnswer,
    make_call_id,
)
from rose_backend.server.chat_template import parse_arguments, plain_messages, text_lengths
from rose_backend.server.error_answers import ENGINE_HAS_STOPPED, ApiError
from rose_backend.server.generation import WholeAnswer, generate
from rose_backend.server.message_answers import MessageAnswer
from rose_backend.server.middleware import DirectRoute
from rose_backend.server.protocol import (
    Body,
    ChatAnswerModel,
    ChatCompletionRequest,
    ChatMessage,
    CompletionAnswerModel,
    CompletionRequest,
    ConversationRequest,
    CountTokensAnswer,
    CountTokensRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    GenerationRequest,
    LoadLoRAAdapterRequest,
    MessageModel,
    MessagesErrorAnswer,
    MessagesRequest,
    ModelList,
    NamedToolChoice,
    ResponseModel,
    ResponsesRequest,
    StreamOptions,
    TokenizeAnswer,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    VersionAnswer,
    check_other_fields,
    measure_json,
    naming,
    refused,
)
from rose_backend.server.response_answers import ResponseAnswer
from rose_backend.server.service import Service

router = APIRouter()
adapter_router = APIRouter()
"""Where clients may load adapters."""
T = TypeVar("T")

_MAX_PARALLEL_LENGTH = 1 << 18
"""Characters and token ids to truncate that are processed beside others."""
_MAX_INLINE_LENGTH = 8192
"""Characters and token ids that are processed on the event loop; more are in a thread, to not delay streams."""
_LENGTH_OF_EACH = 128
"""Characters whose processing takes as long as the fixed cost of a prompt or message."""

_IDS_AT_ONCE = 4096
"""Token ids that are written as JSON in less than a millisecond."""
_CHARACTERS_AT_ONCE = 1 << 16
"""Characters that are written as JSON in less than a millisecond."""

# Of each event; its data is JSON, or [DONE].
_EVENT_SCHEMA = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorAnswer} for status in ("4XX", "5XX")
}
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
    tenant = service.namespaces.tenant(request.headers)
    params = body.sampling_params(service.sampling_defaults.fields)
    processor = service.engine.input_processor
    options = body.prompt_options(processor.max_model_len)
    prompts: list[str | list[int]] | None
    prompts = read_prompts(body.prompt, service.settings.max_prompts, processor.max_model_len)
    if options.truncate_prompt_tokens is None:
        longest = max((len(each) for each in prompts if isinstance(each, str)), default=0)
        check_text_length("prompt", longest, processor)
    length = length_of(prompts)
    inputs = await run_by_length(
        length,
        partial(processor.process_all, prompts, [params] * len(prompts), namespace, options, tenant),
        None if options.truncate_prompt_tokens is None else service.long_truncation,
    )
    inputs = with_adapter(request, inputs, body)
    # The request may wait for long, and a list of token ids takes ten times the memory of an array.
    body.prompt = prompts = None
    echo = None
    # As in vLLM, who asks for the prompt's tokens does not get its text.
    if body.echo and not body.return_token_ids:
        echo = await run_by_length(length, lambda: [text_of(each, processor) for each in inputs])
    check_answer_tokens(inputs, echo, service, bool(body.return_token_ids))
    answer = CompletionAnswer(
        answer_options(request, body, inputs, "cmpl-"),
        echo=echo,
        echoed_logprobs=body.logprobs if body.echo else None,
        shows_prompt_only=body.shows_prompt_only,
        decode=partial(processor.tokenizer.decode, skip_special_tokens=False),
    )
    with naming(body.grammar_field, "structured_outputs"):
        return await generate(request, inputs, answer, is_streaming=bool(body.stream))


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatAnswerModel, "content": _EVENTS}}, tags=["generate"]
)
async def chat(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    return await answer_chat(request, body, ChatAnswer)


async def answer_chat(
    request: Request,
    body: ChatCompletionRequest,
    make_answer: Callable[..., Answer],
    prefix: str = "chatcmpl-",
) -> Response:
    """Answer a conversation.

    Args:
        make_answer: takes what ``ChatAnswer`` does.
        prefix: of the answer's id.
    """
    service = check_body(request, body)
    namespace = service.namespaces.namespace(request.headers, body.cache_salt)
    tenant = service.namespaces.tenant(request.headers)
    params = body.sampling_params(service.sampling_defaults.fields)
    processor = service.engine.input_processor
    options = body.prompt_options(processor.max_model_len, service.sampling_defaults.max_new_tokens)
    truncates = options.truncate_prompt_tokens is not None
    conversation = await read_conversation(request, body, body.messages, truncates=truncates)
    reasons = answer_reasons(body, service, conversation)
    parser = parser_of(body, service, reasons=reasons)
    if reasons and params.structured_outputs is not None:
        params = replace(
            params, structured_outputs=after_reasoning(params.structured_outputs, body, processor)
        )
    parser_name = service.settings.tool_call_parser
    if body.parses_tool_calls and parser_name and MAKE_TOOL_CALL_PARSER[parser_name].needs_special_tokens:
        params = replace(params, skip_special_tokens=False)

    def process() -> list[ProcessedInput]:
        with naming("messages"):
            ids = processor.encode_prompt(conversation.render(), options)
            return processor.process_all([ids], [params], namespace, options, tenant)

    inputs = await run_by_length(conversation.length, process, service.long_truncation if truncates else None)
    inputs = with_adapter(request, inputs, body)
    check_answer_tokens(inputs, None, service, bool(body.return_token_ids))
    role = conversation.answer_role
    echo = conversation.final if body.echo and conversation.final_role == role else ""
    answer = make_answer(
        answer_options(request, body, inputs, prefix)._replace(role=role, echo=echo),
        token_bytes=processor.tokenizer.token_texts.bytes_of,
        num_top_logprobs=body.top_logprobs or 0,
        parser=parser,
        max_calls=1 if body.parallel_tool_calls is False else None,
        shows_reasoning=body.include_reasoning is not False,
        make_call_id=MAKE_CALL_ID.get(service.settings.tool_call_parser, make_call_id),
    )
    with naming(body.grammar_field, "structured_outputs"):
        return await generate(request, inputs, answer, is_streaming=bool(body.stream))


@router.post(
    "/v1/responses", responses={200: {"model": ResponseModel, "content": _EVENTS}}, tags=["generate"]
)
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation, in OpenAI's newer format. Nothing is stored."""
    if body.earlier_response is not None:
        raise not_stored("previous_response_id", body.earlier_response)
    service = check_body(request, body)
    tokenizer = service.engine.input_processor.tokenizer
    mark = tokenizer.encode(END_OF_REASONING, add_special_tokens=False)

    def make_answer(options: AnswerOptions, **how: Any) -> ResponseAnswer:
        return ResponseAnswer(
            options,
            echoed=body.echoed(service.sampling_defaults.sampling_params()),
            usage=request.state.record.usage,
            end_of_reasoning=mark[0] if len(mark) == 1 else None,
            **how,
        )

    with naming_all(body.renamed):
        return await answer_chat(request, body.chat_request(), make_answer, "resp_")


@router.api_route(
    "/v1/responses/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
)
async def find_response(response_id: str) -> Response:
    """Refuse: answers are not stored."""
    raise not_stored("response_id", response_id)


def not_stored(field: str, response_id: str) -> ApiError:
    """Return the refusal of a field that names an earlier answer."""
    return ApiError(
        404,
        f"{field}: got {response_id[:200]!r}, but answers are not stored; send the conversation as input",
        param=field,
    )


@router.post(
    "/v1/messages",
    responses={200: {"model": MessageModel, "content": _EVENTS}, **_MESSAGES_ERRORS},
    tags=["generate"],
)
async def answer_messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, in Anthropic's format."""
    check_body(request, body)
    make_answer = partial(MessageAnswer, usage=request.state.record.usage)
    with naming_all(body.renamed):
        return await answer_chat(request, await translated(request, body), make_answer, "msg_")


@router.post(
    "/v1/messages/count_tokens",
    responses={200: {"model": CountTokensAnswer}, **_MESSAGES_ERRORS},
    tags=["tokens"],
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Return how many tokens a conversation in Anthropic's format has."""
    service = check_body(request, body)
    processor = service.engine.input_processor
    chat_body = await translated(request, body)
    conversation = await read_conversation(request, chat_body, chat_body.messages, truncates=False)

    def count() -> Response:
        with naming("messages"):
            token_ids = processor.encode(
                conversation.render(),
                max_tokens=max(processor.max_model_len, MAX_CUT_TOKENS),
                add_special_tokens=False,
            )
        number = len(token_ids)
        return _json({"input_tokens": number, "context_management": {"original_input_tokens": number}})

    with naming_all(body.renamed):
        return await run_by_length(conversation.length, count)


@router.get("/v1/models", responses={200: {"model": ModelList}}, tags=["models"])
async def list_models(request: Request) -> Response:
    """List the names that requests may use."""
    service: Service = request.app.state.service
    root, window = service.engine.config.model, service.engine.input_processor.max_model_len
    served: list[tuple[str, str, str | None, int | None]]
    served = [(name, root, None, window) for name in service.settings.served_model_names]
    # As in vLLM, these do not repeat the window.
    served += [(each.lora.lora_name, each.root, each.parent, None) for each in service.adapters]
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.start_time_s,
            "owned_by": "rose_backend",
            "root": path,
            "parent": parent,
            "permission": [_permission(service)],
            "max_model_len": max_model_len,
        }
        for name, path, parent, max_model_len in served
    ]
    return _json({"object": "list", "data": cards})


def _permission(service: Service) -> dict[str, Any]:
    """Return what OpenAI's models had of old, with vLLM's values."""
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    others = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
    return {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": service.start_time_s,
        "organization": "*",
        "group": None,
        **allowed,
        **dict.fromkeys(others, False),
    }


@router.post("/tokenize", responses={200: {"model": TokenizeAnswer}}, tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of a prompt, or of a conversation as the chat template writes it."""
    service = check_body(request, body)
    processor = service.engine.input_processor
    if (body.prompt is None) == (body.messages is None):
        got = "nothing" if body.prompt is None else "a prompt and messages"
        raise refused("prompt", f"got {got}, allowed is either a prompt or messages")
    conversation: Conversation | None = None
    if body.messages is None:
        body.check_prompt_fields()
        check_text_length("prompt", len(body.prompt or ""), processor)
    else:
        conversation = await read_conversation(request, body, body.messages, truncates=False)

    def encode() -> Response:
        adds = body.add_special_tokens
        with naming("messages" if conversation else "prompt"):
            token_ids = processor.encode(
                conversation.render() if conversation else body.prompt or "",
                max_tokens=max(processor.max_model_len, MAX_CUT_TOKENS),
                add_special_tokens=conversation is None if adds is None else adds,
            )
        strs = processor.tokenizer.token_strs if body.return_token_strs else None
        counts = {"count": len(token_ids), "max_model_len": processor.max_model_len}
        return _json_with_ids(counts, token_ids, strs)

    return await run_by_length(conversation.length if conversation else len(body.prompt or ""), encode)


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


@router.get("/health", response_class=Response, tags=["operations"])
async def health(request: Request) -> Response:
    """Report by the status whether requests are served: 503 after a failure of the engine, while it does not answer,
    and while shutting down."""
    service: Service = request.app.state.service
    if service.is_draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    if not service.engine.is_running:
        raise ApiError(503, ENGINE_HAS_STOPPED, code="engine_dead")
    if service.engine.is_stalled:
        raise EngineStalledError
    return Response()


@router.get("/ping", response_class=Response, tags=["operations"])
@router.post("/ping", response_class=Response, tags=["operations"])
# This one answers, so that a refusal of another method names both; those above give the schema one operation id each.
@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def ping(request: Request) -> Response:
    """Report the same as ``/health``, where SageMaker looks for it."""
    return await health(request)


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


@adapter_router.post("/v1/load_lora_adapter", response_class=Response, tags=["models"])
async def load_lora_adapter(request: Request, body: LoadLoRAAdapterRequest) -> Response:
    """Load a LoRA adapter, which requests can name as their model from then on."""
    check_other_fields(body)
    await request.app.state.service.adapters.load(body)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@adapter_router.post("/v1/unload_lora_adapter", response_class=Response, tags=["models"])
async def unload_lora_adapter(request: Request, body: UnloadLoRAAdapterRequest) -> Response:
    """Unload a LoRA adapter. Requests that use it are answered to their end."""
    check_other_fields(body)
    await request.app.state.service.adapters.unload(body)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


DIRECT_ROUTES: dict[str, DirectRoute] = {
    "/v1/completions": (CompletionRequest, complete),
    "/v1/chat/completions": (ChatCompletionRequest, chat),
    "/v1/responses": (ResponsesRequest, respond),
    "/v1/messages": (MessagesRequest, answer_messages),
    "/v1/messages/count_tokens": (CountTokensRequest, count_tokens),
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
}
"""By path: what ``DirectRoutes`` answers without FastAPI."""
ADAPTER_ROUTES: dict[str, DirectRoute] = {
    "/v1/load_lora_adapter": (LoadLoRAAdapterRequest, load_lora_adapter),
    "/v1/unload_lora_adapter": (UnloadLoRAAdapterRequest, unload_lora_adapter),
}
"""The same where clients may load adapters."""


def check_body(request: Request, body: Body) -> Service:
    """Check the model's name and the fields unknown to the body's model; return the service.

    Raises:
        ApiError: 404, the model is not served here.
        RequestError: see ``check_other_fields``.
    """
    service: Service = request.app.state.service
    find_adapter(service, body.model)
    check_other_fields(body)
    return service


def find_adapter(service: Service, name: str | None) -> ServedAdapter | None:
    """Return the adapter that a request names as its model; None: it names the base model, or nothing.

    Raises:
        ApiError: 404, there is no model of this name.
    """
    names = service.settings.served_model_names
    adapter = service.adapters.find(name)
    if adapter is None and name is not None and name not in names:
        names = (*names, *(each.lora.lora_name for each in service.adapters))
        raise ApiError(
            404,
            f"model: got {name[:200]!r}, allowed here: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return adapter


def with_adapter(
    request: Request, inputs: list[ProcessedInput], body: GenerationRequest
) -> list[ProcessedInput]:
    """Return prompts with the adapter that the request names, and let the request hold it until its end.

    Errors are those of ``find_adapter``.
    """
    service: Service = request.app.state.service
    # Only now: it may have been unloaded, or loaded again, while prompts were tokenized.
    adapter = find_adapter(service, body.model)
    if adapter is None:
        return inputs
    service.adapters.hold(adapter)
    request.state.record.adapter = adapter
    return [each._replace(lora_id=adapter.lora.lora_int_id) for each in inputs]


@contextlib.contextmanager
def naming_all(renamed: Mapping[str, str]) -> Iterator[None]:
    """Let refusals of a chat name the fields that it was made of."""
    with contextlib.ExitStack() as stack:
        for field, own in renamed.items():
            stack.enter_context(naming(own, field))
        yield


async def translated(request: Request, body: CountTokensRequest) -> ChatCompletionRequest:
    """Return the chat that asks for the same, made in a thread if there are many messages, or long ones."""
    template = request.app.state.service.chat_template

    def merges_instructions() -> bool:
        return bool(template.takes_instructions_in_front_only)

    make = partial(body.chat_request, merges_instructions=merges_instructions)
    return await run_by_length(_LENGTH_OF_EACH * body.num_blocks + request.state.num_body_bytes, make)


class Conversation(NamedTuple):
    """A conversation whose lengths and fields have been checked."""

    final: str
    """Text of the last message."""
    final_role: str
    answer_role: str
    """Of the answer: that of the last message where the prompt does not end with the start of the assistant's."""
    variables: Mapping[str, Any]
    """Of the chat template."""
    length: int
    """What ``length_of`` measures."""
    render: Callable[[], str]
    """Returns the prompt's text; errors are those of ``ChatTemplate.render`` and ``parse_arguments``."""


async def read_conversation(
    request: Request, body: ConversationRequest, messages: list[ChatMessage], *, truncates: bool
) -> Conversation:
    """Return a conversation as every route renders it; a long one is read in a thread.

    Args:
        truncates: whether the prompt may be longer than the window.

    Raises:
        RequestError: there is no template, or something is too long, or not supported.
    """
    read = partial(_read_conversation, body, messages, request.app.state.service, truncates=truncates)
    return await run_by_length(request.state.num_body_bytes, read)


def _read_conversation(
    body: ConversationRequest, messages: list[ChatMessage], service: Service, *, truncates: bool
) -> Conversation:
    processor, template = service.engine.input_processor, service.chat_template
    adds_start = body.adds_generation_prompt()
    max_length = max_text_length(processor)
    if truncates:
        max_length = max(max_length, service.settings.max_body_bytes)
    template.check_available()
    plain = plain_messages(messages)
    lengths = text_lengths(plain)
    if not truncates:
        check_text_length("messages", sum(lengths), processor)
    tools = [tool.for_template() for tool in body.tools or ()] or None
    variables = body.template_variables()
    for field, value in (("tools", tools), ("chat_template_kwargs", variables)):
        lengths.append(measure_json(field, value))
        check_text_length(field, lengths[-1], processor)

    def render() -> str:
        parse_arguments(plain)
        # A template may show a text more than once.
        return template.render(
            plain,
            add_generation_prompt=adds_start,
            max_length=max_length,
            tools=tools,
            variables=variables,
            continues=bool(body.continue_final_message),
        )

    length = sum(lengths) + _LENGTH_OF_EACH * len(lengths)
    final, final_role = plain[-1]["content"], plain[-1]["role"]
    answer_role = "assistant" if adds_start else final_role
    return Conversation(final, final_role, answer_role, variables, length, render)


def answer_reasons(body: ChatCompletionRequest, service: Service, conversation: Conversation) -> bool:
    """Return whether answers begin with reasoning that is to be told apart."""
    if service.settings.reasoning_parser is None:
        return False
    if body.continue_final_message:
        return "<think>" in conversation.final and END_OF_REASONING not in conversation.final
    # As in vLLM, models in the format qwen3 reason unless they are told not to; those of deepseek_r1 always do.
    is_told = bool(conversation.variables.get("enable_thinking", True))
    return is_told or service.settings.reasoning_parser != "qwen3"


def after_reasoning(
    structured: StructuredOutputsParams, body: ChatCompletionRequest, processor: InputProcessor
) -> StructuredOutputsParams:
    """Let the structured text start after the reasoning.

    Raises:
        RequestError: the model has no token for its end.
    """
    token_ids = processor.tokenizer.encode(END_OF_REASONING, add_special_tokens=False)
    if len(token_ids) != 1:
        raise refused(
            body.grammar_field,
            f"got one beside --reasoning-parser for a model without a token {END_OF_REASONING}, allowed is none",
        )
    return structured.starting_after(token_ids[0])


def parser_of(
    body: ChatCompletionRequest, service: Service, *, reasons: bool
) -> Callable[[], AnswerParser] | None:
    """Return what makes a parser for each answer; None where answers are content only.

    Raises:
        RequestError: the server was not started for what the request needs.
    """
    settings = service.settings
    make: Callable[[], AnswerParser] | None = None
    if isinstance(body.tool_choice, NamedToolChoice):
        make = partial(NamedCallParser, body.tool_choice.function.name)
    elif body.tool_choice == "required":
        make = RequiredCallsParser
    if body.parses_tool_calls:
        if not settings.enable_auto_tool_choice or settings.tool_call_parser is None:
            raise refused(
                "tool_choice",
                "got tools for the model to choose from, which needs a server that was started with "
                "--enable-auto-tool-choice and --tool-call-parser; allowed here is 'none'",
            )
        make = MAKE_TOOL_CALL_PARSER[settings.tool_call_parser]
    if not reasons:
        return make
    make_answer = make or PlainParser
    return lambda: ReasoningParser(make_answer())


def answer_options(
    request: Request, body: GenerationRequest, inputs: list[ProcessedInput], prefix: str
) -> AnswerOptions:
    """Return what the answer takes over; its id is ``prefix`` and the request's."""
    service: Service = request.app.state.service
    streaming = body.stream_options or StreamOptions()
    return AnswerOptions(
        id=f"{prefix}{request.state.record.request_id}",
        created=int(time.time()),
        model=service.model_name if service.adapters.find(body.model) is None else str(body.model),
        n=inputs[0].params.n,
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.continuous_usage_stats),
        prompts=[each.token_ids for each in inputs],
        return_token_ids=bool(body.return_token_ids),
        tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        fingerprint=service.fingerprint,
    )


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
        raise refused(
            "prompt",
            f"got {reprlib.repr(value)}, allowed are a string, a list of token ids, a list of strings and "
            "a list of lists of token ids",
        )
    return prompts


def check_number(field: str, number: int, what: str, limit: int) -> None:
    """Raise RequestError if ``number`` of ``what`` is more than ``limit``."""
    if number > limit:
        raise refused(field, f"got {number} {what}, allowed are at most {limit}")


def check_text_length(field: str, num_characters: int, processor: InputProcessor) -> None:
    """Raise RequestError if a text is longer than a window full of the longest token, before it is tokenized."""
    limit = max_text_length(processor)
    if num_characters > limit:
        raise refused(
            field,
            f"got {num_characters} characters, allowed are at most {limit}: this model's maximum context length "
            f"is {processor.max_model_len} tokens, none longer than {processor.tokenizer.max_token_length} characters",
        )


def max_text_length(processor: InputProcessor) -> int:
    """Return the characters of a window full of the longest token."""
    return processor.max_model_len * processor.tokenizer.max_token_length


def check_answer_tokens(
    inputs: list[ProcessedInput], echo: list[str] | None, service: Service, returns_token_ids: bool
) -> None:
    """Check how much one answer may become. A single completion is bounded by the window.

    Args:
        inputs: of one request, with the same parameters but for ``max_tokens``.
        echo: text that precedes the completions of each.
        returns_token_ids: whether each completion comes with its token ids and those of its prompt.

    Raises:
        RequestError: all completions together may have more tokens and log-probabilities than one request may ask for.
    """
    limit, max_model_len = service.settings.max_answer_tokens, service.engine.input_processor.max_model_len
    n, num_logprobs = inputs[0].params.n, inputs[0].params.logprobs or 0
    if len(inputs) * n == 1:
        return
    limits = (each.params.max_tokens or max_model_len - len(each.token_ids) for each in inputs)
    num_tokens = n * sum(limits) * (1 + num_logprobs + returns_token_ids) + n * sum(map(len, echo or ()))
    num_prompt_logprobs = inputs[0].params.prompt_logprobs
    per_prompt_token = returns_token_ids + (0 if num_prompt_logprobs is None else 1 + num_prompt_logprobs)
    num_tokens += n * sum(len(each.token_ids) for each in inputs) * per_prompt_token
    if num_tokens > limit:
        raise refused(
            "max_tokens",
            f"got up to {num_tokens} tokens in {len(inputs) * n} completions, each counted once and once "
            f"more for each of its {num_logprobs} log-probabilities, echoed characters, prompts' log-probabilities and "
            f"returned token ids included; allowed are at most {limit} in one request (--max-answer-tokens)",
        )


def text_of(processed: ProcessedInput, processor: InputProcessor) -> str:
    """Return the text of a prompt, which may have come as token ids."""
    if processed.prompt is not None:
        return processed.prompt
    return processor.tokenizer.decode(processed.token_ids.tolist(), skip_special_tokens=False)


def length_of(texts: Sequence[str | list[int]]) -> int:
    """Return a measure for how long it takes to process texts or lists of token ids."""
    return sum(map(len, texts)) + _LENGTH_OF_EACH * len(texts)


async def run_by_length(
    length: int, work: Callable[[], T], one_at_a_time: asyncio.Semaphore | None = None
) -> T:
    """Do the work here, or in a thread if there are many characters or token ids.

    Args:
        one_at_a_time: what work of more than ``_MAX_PARALLEL_LENGTH`` waits for. Without it, many such texts at once
            could use up the memory.
    """
    if length <= _MAX_INLINE_LENGTH:
        return work()
    if one_at_a_time is None or length <= _MAX_PARALLEL_LENGTH:
        return await asyncio.to_thread(work)
    await one_at_a_time.acquire()
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    # A thread goes on when its client has left.
    thread.add_done_callback(lambda _: one_at_a_time.release())
    return await asyncio.shield(thread)


def _json_with_ids(
    answer: Mapping[str, object], token_ids: list[int], strs: Callable[[list[int]], list[str]] | None
) -> Response:
    """Return ``answer`` with lists that may be long: encoded in one call, they would hold the interpreter lock.

    Args:
        strs: returns the texts of tokens, which are added to the answer, too.
    """
    pieces = [json.dumps(answer)[:-1].encode()]
    for name, items in (("tokens", list), ("token_strs", strs)):
        if items is None:
            pieces.append(f', "{name}": null'.encode())
        else:
            pieces.append(f', "{name}": ['.encode())
            for first in range(0, len(token_ids), _IDS_AT_ONCE):
                separator = ", " if first else ""
                part = items(token_ids[first : first + _IDS_AT_ONCE])
                pieces.append((separator + json.dumps(part)[1:-1]).encode())
            pieces.append(b"]")
    return WholeAnswer([*pieces, b"}"])


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
        raise refused(field, f"got {reprlib.repr(value)}, allowed is a list of token ids")
    check_number(field, len(value), "token ids", max_number)
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) < vocab_size:
        return value
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise refused(
                f"{field}.{index}",
                f"got {reprlib.repr(token_id)}, allowed are integers from 0 to {vocab_size - 1}",
            )
    return value
