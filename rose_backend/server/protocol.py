"""Bodies of requests and answers as pydantic models, which describe the API in /openapi.json.

The models of requests also check types and ranges. Those of answers are for /openapi.json only;
``answers`` formats the text.

``null`` means the same as leaving a field out. Ranges are those of ``SamplingParams``, which also checks fields against
each other.

Fields that are not in a model: one that would change the answer and is not supported is refused by name, unless its
value is neutral. One that changes no answer is ignored. Any other is ignored with a debug line, unless its name is so
close to a known one that it is probably misspelt: then it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.types import FailFast
from pydantic_core import PydanticCustomError, PydanticKnownError

from rose_backend.config import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_LENGTH,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from rose_backend.engine.request import PromptOptions
from rose_backend.engine.sampling_params import RANGES, TOKEN_IDS, SamplingParams
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.errors import RequestError
from rose_backend.server.settings import (
    MAX_ARGUMENTS_LENGTH,
    MAX_BLOCKS,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_NAME_LENGTH,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_UNKNOWN_FIELDS,
)

logger = logging.getLogger(__name__)

_SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

_EMPTY: tuple[object, ...] = (None, [], {}, "")
# Field of OpenAI's or vLLM's -> its neutral values.
NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "reasoning_effort": (None, "none"),
    "length_penalty": (None, 1.0),
    "spaces_between_special_tokens": (None, True),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "return_prompt_text": (None, False),
    **dict.fromkeys(
        (*("echo", "use_beam_search", "early_stopping", "continue_final_message", "return_token_strs"),),
        (None, False),
    ),
    **dict.fromkeys(
        (
            *("suffix", "tools", "functions", "audio", "prediction", "web_search_options"),
            *("prompt_embeds", "logits_processors"),
            *("logprob_token_ids", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "chat_template", "chat_template_kwargs", "documents"),
            *(
                "mm_processor_kwargs",
                "media_io_kwargs",
                "kv_transfer_params",
                "ec_transfer_params",
                "vllm_xargs",
            ),
        ),
        _EMPTY,
    ),
}
IGNORED = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        # Of tools that the server itself would call.
        "max_tool_calls",
        *("parallel_tool_calls", "include_reasoning", "priority", "request_id", "session_id"),
        # vLLM ignores these on routes that generate, or in models without experts or images.
        *("return_token_offsets", "mm_payload", "return_mm_kwargs", "routed_experts_prompt_start"),
        # How many tokens come in an event, which changes no text.
        "stream_interval",
        # Of Anthropic's: which prompts to cache, and where to compute.
        *("cache_control", "inference_geo"),
    }
)
_OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "self", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "additional_special_tokens",
    }
)
"""Of chat templates."""
_MAX_NAME_LENGTH = 64
_LIKENESS = 0.8


def _refuse_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _refuse_text(value: Any) -> Any:
    """Numbers of log-probabilities are no texts in vLLM, either."""
    if isinstance(value, (bool, str)):
        raise PydanticKnownError("int_type")
    return value


def _at_most(limit: int) -> BeforeValidator:
    """Refuse dictionaries of more items before any is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            details = {"field_type": "Dictionary", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", details)
        return value

    return BeforeValidator(check)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]
# As in vLLM, texts of numbers are numbers, and 1.0 is an integer.
Int = Annotated[int, Strict(False)]
Float = Annotated[float, Strict(False)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
Bias = Annotated[Float, Field(allow_inf_nan=False), BeforeValidator(_refuse_truth_value)]
_LARGEST_BIAS = 100.0
TokenId = Annotated[Int, Field(ge=TOKEN_IDS.low, le=TOKEN_IDS.high), BeforeValidator(_refuse_truth_value)]
# A union over long lists would collect an error per element and branch; ``read_prompts`` checks it instead.
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


def in_range(name: str) -> Any:
    """Return a field that may be left out, with the range of a sampling parameter."""
    low, high, above_low = RANGES[name]
    return Field(None, gt=low, le=high) if above_low else Field(None, ge=low, le=high)


def refused(field: str, reason: str) -> RequestError:
    """Return the refusal of a field; ``reason`` is what was got and what is allowed."""
    return RequestError(f"{field}: {reason}", parameter=field)


@contextlib.contextmanager
def naming(field: str, instead_of: str = "prompt") -> Iterator[None]:
    """Let refusals name ``field``, of which what they refuse was made."""
    try:
        yield
    except RequestError as error:
        own = str(error.parameter).partition(".")[0]
        if own != instead_of or own == field:
            raise
        raise refused(field, str(error).removeprefix(f"{error.parameter}: ")) from error


class Body(BaseModel):
    """Base of all bodies: no type conversions but those of ``Int`` and ``Float``.

    Unknown fields are kept for ``check_other_fields``.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    not_supported: ClassVar[Mapping[str, tuple[object, ...]]] = NOT_SUPPORTED
    """Fields that are refused, and their neutral values; those that a model has are served."""

    model: str | None = None

    @field_validator(
        *(RANGES.keys() - {"logprobs", "prompt_logprobs"}),
        *("max_completion_tokens", "max_output_tokens", "truncate_prompt_tokens"),
        mode="before",
        check_fields=False,
    )
    @classmethod
    def _refuse_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """vLLM takes true as 1, which is hardly ever meant."""
        if isinstance(value, bool):
            is_float = isinstance(RANGES.get(info.field_name or "", TOKEN_IDS).low, float)
            raise PydanticKnownError("float_type" if is_float else "int_type")
        return value


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    """Send token counts in a last event."""
    continuous_usage_stats: bool | None = None
    """With ``include_usage``, send those of a completion in each of its events, too."""


class JsonSchemaFormat(BaseModel):
    """A schema and its name."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Without effect: answers are always held to the schema."""


class ResponseFormat(BaseModel):
    """What an answer is to be: any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's way to say what an answer is to be; exactly one of the first five. See ``StructuredOutputsParams``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields that are not null, as ``StructuredOutputsParams`` calls them."""
        named = ((name.replace("json_schema", "json"), getattr(self, name)) for name in self.model_fields_set)
        return {name: value for name, value in named if value is not None}


class SamplingRequest(Body):
    """Fields that all routes share which generate. The second half are vLLM's additions to OpenAI's."""

    stream: bool | None = None
    temperature: Float | None = in_range("temperature")
    top_p: Float | None = in_range("top_p")
    seed: Int | None = in_range("seed")
    presence_penalty: Float | None = in_range("presence_penalty")
    frequency_penalty: Float | None = in_range("frequency_penalty")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: Annotated[dict[str, Bias], _at_most(MAX_LOGIT_BIAS_TOKENS)] | None = None
    """By token id; as in vLLM, less than -100 counts as that, and more than 100 as 100."""

    top_k: Int | None = in_range("top_k")
    min_p: Float | None = in_range("min_p")
    repetition_penalty: Float | None = in_range("repetition_penalty")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)
    """Only requests with the same salt, and the same API key, share cached prefixes."""

    _refuse_text = field_validator("prompt_logprobs", "top_logprobs", mode="before", check_fields=False)(
        _refuse_text
    )


class GenerationRequest(SamplingRequest):
    """Fields that completions and chat completions share besides. The second half are vLLM's additions."""

    n: Int | None = in_range("n")
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = in_range("max_tokens")
    response_format: ResponseFormat | None = None

    min_tokens: Int | None = in_range("min_tokens")
    prompt_logprobs: Int | None = in_range("prompt_logprobs")
    """Report log-probabilities of the prompt's tokens, and this many of the most likely ones; not in streams."""
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens are added to a text. Unless given they are to prompts, and not to
    conversations, in which the chat template writes them."""
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)
    """Cut longer prompts to this many tokens; -1: to the window less one token."""
    truncation_side: Literal["left", "right"] | None = None
    """Where they are cut. If not given, on the left, except for special tokens that were added there."""
    return_token_ids: bool | None = None
    """Add the token ids of the prompt and of each completion; completions then do not ``echo`` its text."""
    return_tokens_as_token_ids: bool | None = None
    """Call tokens ``token_id:5`` in log-probabilities, instead of by their text."""

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of the request; a field that is missing or null takes its default.

        Args:
            defaults: fields of ``SamplingParams`` that have others than its own.

        Raises:
            RequestError: values that are valid each but not together.
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set & _SAMPLING_NAMES}
        given = {name: value for name, value in fields.items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {
                key: min(max(value, -_LARGEST_BIAS), _LARGEST_BIAS) for key, value in self.logit_bias.items()
            }
        if self.stream_options is not None and not self.stream:
            raise refused(
                "stream_options", "got options without stream, allowed with stream set to true only"
            )
        if self.stream and self.prompt_logprobs:
            raise refused(
                "prompt_logprobs", f"got {self.prompt_logprobs} with stream, allowed without a stream only"
            )
        given["structured_outputs"] = self._structured_outputs()
        return SamplingParams(**{**defaults, **given, **self._route_params()})

    @property
    def grammar_field(self) -> str:
        """The field that refusals of what the answer is to be name."""
        wants_text = self.response_format is None or self.response_format.type == "text"
        return "structured_outputs" if wants_text else "response_format"

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        given = {} if self.structured_outputs is None else self.structured_outputs.given()
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            given["json_object"] = True
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise refused("response_format", "got json_schema without one, allowed is one with a schema")
            given["json"] = wanted.json_schema.json_schema
        elif self.structured_outputs is None:
            return None
        with naming(self.grammar_field, "structured_outputs"):
            return StructuredOutputsParams(**given)

    def prompt_options(self, max_model_len: int, max_new_tokens: int | None = None) -> PromptOptions:
        """Return how prompts are read. An answer that a prompt leaves no room for is cut off there, as in vLLM.

        Args:
            max_model_len: the window, in tokens.
            max_new_tokens: of an answer, if the request does not say.

        Raises:
            RequestError: a prompt or an answer of more tokens than a window has is asked for.
        """
        limits = [name for name in self._limit_names if getattr(self, name) is not None]
        for name in (*limits[:1], "truncate_prompt_tokens"):
            if (limit := getattr(self, name)) is not None and limit > max_model_len:
                raise refused(name, f"got {limit}, allowed are at most {max_model_len}, the model's window")
        limit, adds = self.truncate_prompt_tokens, self.add_special_tokens
        if limit == 0:
            raise refused("truncate_prompt_tokens", f"got 0, allowed are -1 and 1 to {max_model_len}")
        return PromptOptions(
            max_new_tokens,
            add_special_tokens=self._adds_special_tokens if adds is None else adds,
            truncate_prompt_tokens=max_model_len - 1 if limit == -1 else limit,
            truncation_side=self.truncation_side,
            clips_max_tokens=True,
        )

    _adds_special_tokens: ClassVar[bool] = True
    """Unless the request says."""

    _limit_names: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Fields with the limit of an answer; the first one that is given counts."""

    def _route_params(self) -> dict[str, Any]:
        """Check and return what only one route's body expresses."""
        return {}


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    """Let texts, and log-probabilities where ``logprobs`` are asked for, begin with those of the prompt."""
    logprobs: Int | None = in_range("logprobs")
    max_tokens: Int | None = Field(None, ge=0, le=RANGES["max_tokens"].high)
    """0, with ``echo`` only, answers with the prompt alone. One token is computed and counted, as in vLLM."""

    _refuse_text_in_logprobs = field_validator("logprobs", mode="before")(_refuse_text)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether log-probabilities begin with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def shows_prompt_only(self) -> bool:
        """Whether what is generated is left out of the answer."""
        return bool(self.echo) and self.max_tokens == 0

    def _route_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if self.echoes_logprobs and self.prompt_logprobs is None:
            params["prompt_logprobs"] = self.logprobs
        if self.shows_prompt_only:
            params["max_tokens"] = 1
        return params


class TextPart(BaseModel):
    """One part of a message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class CalledFunction(BaseModel):
    """What an earlier answer called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_LENGTH)] | dict[str, Any] | None = None
    """JSON of an object; anything else counts as an empty one, as in vLLM."""


class ToolCall(BaseModel):
    """One call of an earlier answer."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class SharesTheLock(BaseModel):
    """Base of what a body may have many of."""

    @model_validator(mode="after")
    def _let_others_run(self) -> Self:
        """Do nothing: where Python is called, another thread may take the interpreter lock between two of them."""
        return self


class ChatMessage(SharesTheLock):
    """One message of a conversation. Fields that one role has are refused with another."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    """Left out it is empty, as in vLLM."""
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Earlier name of ``reasoning``, which wins."""


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; answers are held to it where they have to call a tool."""
    strict: bool | None = None
    """Handed to the chat template; with tools that the model chooses, vLLM does not hold answers to it either."""

    def schema_of_arguments(self) -> dict[str, Any]:
        """Return a copy of the outermost level of ``parameters``; without any, those of no argument."""
        return dict(self.parameters or {"type": "object", "properties": {}})


class NamedFunction(BaseModel):
    """The function that the answer has to call."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name


class NamedToolChoice(BaseModel):
    """A tool that the answer has to call."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"] = "function"
    function: NamedFunction


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"] = "function"
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as vLLM hands it to templates."""
        function = self.function
        fields: dict[str, Any] = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        if function.strict is not None:
            fields["strict"] = function.strict
        return {"type": self.type, "function": fields}


class ConversationRequest(Body):
    """Fields of both routes that render a conversation, beside its messages."""

    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the start of the assistant's answer; true unless given."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as enable_thinking."""
    reasoning_effort: Effort | None = None
    """A variable of the chat template; also sets enable_thinking, unless chat_template_kwargs has it."""
    continue_final_message: bool | None = None
    """Let the answer go on with the last message, which the prompt then ends with."""

    def template_variables(self) -> dict[str, Any]:
        """Return the variables that the request sets in the chat template.

        Raises:
            RequestError: one is not the request's to set.
        """
        variables = dict(self.chat_template_kwargs or {})
        for name in variables:
            if name in _OWN_VARIABLES:
                raise refused(
                    "chat_template_kwargs", f"got {name}, which the server sets; allowed are other names"
                )
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        return variables

    def adds_generation_prompt(self) -> bool:
        """Return whether the prompt ends with the start of an answer.

        Raises:
            RequestError: it is to end with the last message, too.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise refused(
                "continue_final_message",
                "got true together with add_generation_prompt, allowed is one of them",
            )
        return self.add_generation_prompt is not False and not self.continue_final_message


class ChatCompletionRequest(GenerationRequest, ConversationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = in_range("max_tokens")
    """Counts instead of ``max_tokens`` where both are given."""
    logprobs: bool | None = None
    top_logprobs: Int | None = in_range("logprobs")
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """Whether the model may call tools; auto if there are any. Those that it has to call come before what else the
    answer is to be."""
    parallel_tool_calls: bool | None = None
    """False leaves out all calls but the first."""
    include_reasoning: bool | None = None
    """False leaves reasoning out of the answer."""
    echo: bool | None = None
    """Let the answer begin with the last message, if that is in the answer's role. Whole answers then also have
    log-probabilities of the prompt's tokens, as in vLLM."""

    _adds_special_tokens = False
    _limit_names = ("max_completion_tokens", "max_tokens")

    @property
    def parses_tool_calls(self) -> bool:
        """Whether calls of tools are looked for in the answer, which may have some."""
        return bool(self.tools) and self.tool_choice in ("auto", None)

    @property
    def grammar_field(self) -> str:
        """The field that refusals of what the answer is to be name."""
        return "tool_choice" if self._must_call else super().grammar_field

    @property
    def _must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto", None)

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if not self._must_call:
            return super()._structured_outputs()
        with naming("tool_choice", "structured_outputs"):
            return StructuredOutputsParams(json=self._schema_of_calls())

    def _schema_of_calls(self) -> dict[str, Any]:
        """Return the schema of the arguments of a named function, else of a list of calls; both are vLLM's."""
        functions = {tool.function.name: tool.function for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in functions:
                raise refused("tool_choice", f"got {name!r}, allowed is the name of one of the tools")
            return functions[name].schema_of_arguments()
        definitions: dict[str, Any] = {}
        calls = []
        for name, function in functions.items():
            arguments = function.schema_of_arguments()
            for own, schema in arguments.pop("$defs", {}).items():
                if definitions.setdefault(own, schema) != schema:
                    raise refused(
                        "tools", f"got two schemas named {own!r} in $defs, allowed is one of a name"
                    )
            fields = {"name": {"enum": [name]}, "parameters": arguments}
            calls.append({"type": "object", "properties": fields, "required": list(fields)})
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}

    def _route_params(self) -> dict[str, Any]:
        if self.tool_choice not in ("none", None) and not self.tools:
            shown = self.tool_choice if isinstance(self.tool_choice, str) else "a function"
            raise refused("tool_choice", f"got {shown!r} without tools, allowed with tools only")
        if self.top_logprobs and not self.logprobs:
            raise refused(
                "top_logprobs",
                f"got {self.top_logprobs} without logprobs, allowed with logprobs set to true only",
            )
        params: dict[str, Any] = {
            "max_tokens": self.max_tokens
            if self.max_completion_tokens is None
            else self.max_completion_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        if self.echo and self.prompt_logprobs is None and not self.stream:
            # As in vLLM.
            params["prompt_logprobs"] = self.top_logprobs or 0
        return params


class InputPart(BaseModel):
    """One part of an item's text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


InputText = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


def _joined(text: InputText) -> str:
    return text if isinstance(text, str) else "\n".join(part.text for part in text)


class InputItem(SharesTheLock):
    """One item of a conversation: a message, or what an earlier answer has besides. Fields that one type has are
    refused with another."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: InputText | None = None
    call_id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    name: Name | None = None
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_LENGTH)] | None = None
    output: InputText | None = None
    summary: InputText | None = None
    """Counts as the reasoning if there is no ``content``."""

    def check(self, path: str) -> None:
        """Raise RequestError if a field is missing, or has no meaning in an item of this type."""
        needed = _FIELDS_OF_ITEM[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise refused(f"{path}.{name}", "missing, but required")
        allowed = {"type", "id", "status", *(needed or ("content", "summary"))}
        for name, value in self:
            # Clients send an answer of an earlier turn back with all its empty fields.
            if name not in allowed and value not in (None, [], {}, ""):
                raise refused(
                    f"{path}.{name[:MAX_NAME_LENGTH]}",
                    f"not supported in a {self.type}; allowed are {', '.join(sorted(allowed))}",
                )

    def message(self) -> ChatMessage:
        """Return the item as a message, or as a part of one."""
        fields: dict[str, Any]
        if self.type == "function_call_output":
            fields = {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output or "")}
        elif self.type == "function_call":
            function = CalledFunction.model_construct(name=self.name, arguments=self.arguments)
            call = ToolCall.model_construct(id=self.call_id, function=function)
            fields = {"role": "assistant", "tool_calls": [call]}
        elif self.type == "reasoning":
            fields = {"role": "assistant", "reasoning": _joined(self.content or self.summary or "")}
        else:
            fields = {"role": self.role, "content": _joined(self.content or "")}
        return ChatMessage.model_construct(**fields)


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input_type", "a text or a list of items")
    return value


InputItems = Annotated[
    list[InputItem],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
]
_FIELDS_OF_ITEM: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Each is required."""


def _add_message(messages: list[ChatMessage], new: ChatMessage) -> None:
    """Add what an item says. As in vLLM, what an earlier answer consists of becomes one message."""
    last = messages[-1] if messages else None
    if last is not None and last.role == new.role == "assistant":
        if new.tool_calls:
            last.tool_calls = [*(last.tool_calls or ()), *new.tool_calls]
            return
        for name in ("content", "reasoning"):
            if getattr(new, name) is not None and getattr(last, name) is None:
                setattr(last, name, getattr(new, name))
                return
    messages.append(new)


class OfFunctions(BaseModel):
    """The first field of both that follow."""

    type: Literal["function"]


class FlatTool(FunctionDefinition, OfFunctions):
    """A function that the model may call, without the level that chats have."""

    def nested(self) -> Tool:
        """Return it as chats have it."""
        return Tool.model_construct(function=self)


class FlatToolChoice(NamedFunction, OfFunctions):
    """A tool that the answer has to call, likewise."""

    def nested(self) -> NamedToolChoice:
        """Return it as chats have it."""
        return NamedToolChoice.model_construct(function=self)


class TextFormat(BaseModel):
    """What an answer is to be: any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Without effect: answers are always held to the schema."""

    def echoed(self) -> dict[str, Any]:
        """Return it as answers repeat it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return self.model_dump(by_alias=True)

    def nested(self) -> ResponseFormat:
        """Return it as chats have it."""
        schema = None
        if self.json_schema is not None:
            schema = JsonSchemaFormat.model_construct(name=self.name or "", json_schema=self.json_schema)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(BaseModel):
    """What an answer's text is to be."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None


# Fields that OpenAI's objects have besides, null in answers.
_TOOL_NULLS = dict.fromkeys(("allowed_callers", "async", "defer_loading", "output_schema"))
_REASONING_NULLS = dict.fromkeys(("context", "generate_summary", "mode", "summary"))


class ReasoningOptions(BaseModel):
    """How much the model is to reason."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Effort | None = None


class ResponsesRequest(SamplingRequest):
    """Body of ``POST /v1/responses``, which is answered as the chat that ``chat_request`` returns."""

    input: InputItems
    """A text is a message of the user's."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Int | None = in_range("max_tokens")
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], Field(max_length=MAX_METADATA)] | None = None
    """What answers may have besides. Log-probabilities of the text; nothing else is ever there, as in vLLM."""
    top_logprobs: Int | None = in_range("logprobs")
    """Alternatives to each token of the text; ignored, as in vLLM, where ``include`` asks for no log-probabilities."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto cuts an input that is longer than the window on the left."""
    user: str | None = None
    """Comes back with the answer, as do the next two."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    max_tool_calls: Int | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            _at_most(MAX_METADATA),
        ]
        | None
    ) = None
    """Comes back with the answer."""

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None

    not_supported = {
        **NOT_SUPPORTED,
        "background": (None, False),
        "enable_response_messages": (None, False),
        **dict.fromkeys(
            (
                *("previous_response_id", "conversation", "prompt", "context_management"),
                "previous_input_messages",
            ),
            (None,),
        ),
    }

    renamed: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
        "truncate_prompt_tokens": "truncation",
    }
    """Field of chats -> the one here that it is made of."""

    @property
    def earlier_response(self) -> str | None:
        """Id of the answer that the request goes on from."""
        earlier = (self.model_extra or {}).get("previous_response_id")
        return earlier if isinstance(earlier, str) else None

    @property
    def returns_logprobs(self) -> bool:
        """Whether the answer's text comes with log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())

    def chat_request(self) -> ChatCompletionRequest:
        """Return the chat that asks for the same.

        Raises:
            RequestError: an item lacks a field, or has one of another type, or a schema is too large.
        """
        messages: list[ChatMessage] = []
        if self.instructions:
            messages.append(ChatMessage.model_construct(role="system", content=self.instructions))
        for index, item in enumerate(self.input):
            item.check(f"input.{index}")
            _add_message(messages, item.message())
        shared = SamplingRequest.model_fields.keys() | {"chat_template_kwargs", "include_reasoning"}
        fields = {name: getattr(self, name) for name in self.model_fields_set & shared}
        if self.returns_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            fields |= {"tools": [tool.nested() for tool in self.tools], "tool_choice": self.tool_choice}
            if isinstance(self.tool_choice, FlatToolChoice):
                fields["tool_choice"] = self.tool_choice.nested()
        elif self.tool_choice not in ("none", "auto"):
            fields["tool_choice"] = self.tool_choice
        wanted = self.text and self.text.format
        if wanted and wanted.json_schema is not None:
            # The answer repeats it, also where a call counts instead.
            with naming("text", "structured_outputs"):
                StructuredOutputsParams(json=wanted.json_schema)
        # As in vLLM, an answer that was cut off and comes last is continued.
        last = self.input[-1]
        continues = last.type in ("message", "reasoning") and last.status in ("in_progress", "incomplete")
        return ChatCompletionRequest.model_construct(
            **fields,
            messages=messages,
            max_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=wanted and wanted.nested(),
            reasoning_effort=self.reasoning and self.reasoning.effort,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            continue_final_message=continues,
        )

    def echoed(self, defaults: SamplingParams) -> dict[str, Any]:
        """Return the fields of the request that its answer repeats.

        Args:
            defaults: parameters of a request that says nothing.
        """
        choice = (self.tool_choice or "auto") if self.tools else "none"
        numbers = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in numbers}
        wanted = self.text and self.text.format
        return {
            **{name: getattr(defaults, name) if value is None else value for name, value in given.items()},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": self.reasoning and {**_REASONING_NULLS, **self.reasoning.model_dump()},
            "service_tier": self.service_tier or "auto",
            "text": self.text and {"verbosity": None, "format": wanted and wanted.echoed()},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{**_TOOL_NULLS, **tool.model_dump()} for tool in self.tools or ()],
            "top_logprobs": (self.top_logprobs or 0) if self.returns_logprobs else None,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


class ContentBlock(SharesTheLock):
    """One block of a message. What Anthropic has besides, such as cache_control, is ignored, as in vLLM."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    """Of a tool_result."""
    thinking: str | None = None

    def check(self, role: str, path: str) -> None:
        """Raise RequestError if the role has no blocks of this type, or a field is missing."""
        if self.type not in _BLOCKS_OF_ROLE[role]:
            allowed = ", ".join(_BLOCKS_OF_ROLE[role])
            raise refused(f"{path}.type", f"got {self.type} in the role {role}, allowed are {allowed}")
        for name in _FIELDS_OF_BLOCK[self.type]:
            if getattr(self, name) is None:
                raise refused(f"{path}.{name}", "missing, but required")

    def call(self) -> ToolCall:
        """Return a tool_use as chats have it."""
        function = CalledFunction.model_construct(name=self.name, arguments=self.input)
        return ToolCall.model_construct(id=self.id, function=function)

    def result(self) -> ChatMessage:
        """Return a tool_result as chats have it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return ChatMessage.model_construct(role="tool", tool_call_id=self.tool_use_id, content=text)


_BLOCKS_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_FIELDS_OF_BLOCK: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
"""Each is required."""
_BILLING = "x-anthropic-billing-header"
"""Begins a text of Claude Code's that differs in each request, and would leave nothing to find in the prefix cache."""


class BlockMessage(SharesTheLock):
    """One message of a conversation, as text or in blocks."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS)]

    def instructions(self, path: str) -> str:
        """Return the text of a system message, without what vLLM leaves out."""
        if isinstance(self.content, str):
            return _instructions([self.content])
        for number, block in enumerate(self.content):
            block.check(self.role, f"{path}.content.{number}")
        return _instructions(block.text or "" for block in self.content)

    def chat_messages(self, path: str) -> Iterator[ChatMessage]:
        """Yield a message of another role as chats have it.

        As in vLLM, results of tools come before the user's text, and opaque reasoning is left out.
        """
        if isinstance(self.content, str):
            yield ChatMessage.model_construct(role=self.role, content=self.content)
            return
        texts: list[str] = []
        calls: list[ToolCall] = []
        thoughts: list[str] = []
        for number, block in enumerate(self.content):
            block.check(self.role, f"{path}.content.{number}")
            if block.type == "text" and block.text:
                texts.append(block.text)
            elif block.type == "tool_use":
                calls.append(block.call())
            elif block.type == "tool_result":
                yield block.result()
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
        if texts or self.role == "assistant":
            yield ChatMessage.model_construct(
                role=self.role,
                content="\n".join(texts),
                tool_calls=calls or None,
                reasoning="".join(thoughts) if thoughts else None,
            )


def _instructions(texts: Iterable[str]) -> str:
    return "".join(text for text in texts if not text.startswith(_BILLING))


class SchemaTool(BaseModel):
    """A function that the model may call, as Anthropic has it; other types of tools would run on the server."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def nested(self) -> Tool:
        """Return it as chats have it."""
        schema = self.input_schema if "type" in self.input_schema else {**self.input_schema, "type": "object"}
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=schema, strict=self.strict
        )
        return Tool.model_construct(function=function)


class MessageToolChoice(BaseModel):
    """Which tools the answer may or must call: the model's choice, any, the named one, or none."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None
    """True leaves out all calls but the first."""

    def nested(self) -> Literal["none", "auto", "required"] | NamedToolChoice:
        """Return it as chats have it.

        Raises:
            RequestError: the name is missing.
        """
        if self.type == "any":
            return "required"
        if self.type != "tool":
            return self.type
        if self.name is None:
            raise refused("tool_choice.name", "missing, but required")
        return NamedToolChoice.model_construct(function=NamedFunction.model_construct(name=self.name))


class OutputFormat(BaseModel):
    """JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """What an answer is to be, and how much the model is to reason."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingConfig(BaseModel):
    """Whether the model reasons. A budget of tokens, which the type enabled has, is not supported."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["adaptive", "disabled"]


class CountTokensRequest(Body):
    """Body of ``POST /v1/messages/count_tokens``: what ``/v1/messages`` makes a prompt of."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[BlockMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[SchemaTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    """disabled is ``reasoning_effort`` none, and counts before ``output_config.effort``."""
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    not_supported = {
        **NOT_SUPPORTED,
        "container": (None,),
        "mcp_servers": (None, []),
    }

    renamed: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "thinking",
    }
    """Field of chats -> the one here that it is made of."""

    @property
    def num_blocks(self) -> int:
        """Messages, and blocks of them."""
        return len(self.messages) + sum(
            len(message.content) for message in self.messages if isinstance(message.content, list)
        )

    def chat_request(self, *, merges_instructions: Callable[[], bool]) -> ChatCompletionRequest:
        """Return the chat that asks for the same. Takes some microseconds for each block.

        Args:
            merges_instructions: whether system messages among others have to come in front, as the template refuses
                them elsewhere; called if there are any.

        Raises:
            RequestError: a block lacks a field, or its role has none of that type, or there are too many.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self._chat_messages(merges_instructions),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        choice = self.tool_choice and self.tool_choice.nested()
        if self.tools:
            fields |= {"tools": [tool.nested() for tool in self.tools], "tool_choice": choice}
        elif choice not in ("none", "auto"):
            fields["tool_choice"] = choice
        if self.tool_choice and self.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.output_config:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format:
                schema = self.output_config.format.json_schema
                wanted = JsonSchemaFormat.model_construct(name="json_schema", json_schema=schema)
                fields["response_format"] = ResponseFormat.model_construct(
                    type="json_schema", json_schema=wanted
                )
        if self.thinking and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        return ChatCompletionRequest.model_construct(**fields, **self._answer_fields())

    def _answer_fields(self) -> dict[str, Any]:
        """Return the chat's fields that say how to answer."""
        return {}

    def _chat_messages(self, merges_instructions: Callable[[], bool]) -> list[ChatMessage]:
        if (number := self.num_blocks) > MAX_BLOCKS:
            raise refused(
                "messages", f"got {number} messages and blocks, allowed are at most {MAX_BLOCKS} together"
            )
        system = self.system or ""
        front = [system if isinstance(system, str) else _instructions(part.text for part in system)]
        merges = any(message.role == "system" for message in self.messages) and merges_instructions()
        messages: list[ChatMessage] = []
        for index, message in enumerate(self.messages):
            path = f"messages.{index}"
            if message.role != "system":
                messages += message.chat_messages(path)
            elif merges:
                front.append(message.instructions(path))
            elif text := message.instructions(path):
                messages.append(ChatMessage.model_construct(role="system", content=text))
        if text := "".join(front):
            messages.insert(0, ChatMessage.model_construct(role="system", content=text))
        if not messages:
            raise refused("messages", "got no text, allowed are messages of which at least one has some")
        calls = (call for message in messages for call in message.tool_calls or ())
        # All together: the chat measures each alone.
        measure_json("messages", [call.function.arguments for call in calls])
        return messages


class MessagesRequest(CountTokensRequest):
    """Body of ``POST /v1/messages``, which is answered as the chat that ``chat_request`` returns."""

    max_tokens: Annotated[Int, Field(ge=1, le=RANGES["max_tokens"].high)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Float | None = in_range("temperature")
    top_p: Float | None = in_range("top_p")
    top_k: Int | None = in_range("top_k")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)

    def _answer_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


class TokenizeRequest(ConversationRequest):
    """Body of ``POST /tokenize``: a prompt or a conversation."""

    prompt: str | None = None
    messages: Annotated[
        list[ChatMessage] | None, FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)
    ] = None
    add_special_tokens: bool | None = None
    """As in completions and in chat completions."""
    return_token_strs: bool | None = None
    """Return the tokens as the vocabulary writes them, too."""

    def check_prompt_fields(self) -> None:
        """Raise RequestError if a field has no meaning with a prompt."""
        for name in ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message"):
            if getattr(self, name) not in NOT_SUPPORTED[name]:
                raise refused(name, "got it with a prompt, allowed with messages only")


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    tokens: Annotated[Any, WithJsonSchema({"title": "Tokens", **_TOKEN_IDS, "minItems": 0})]
    """Checked by ``read_token_ids``: the limit depends on the model."""


@functools.cache
def _known_fields(model: type[Body]) -> frozenset[str]:
    return IGNORED.union(model.model_fields, model.not_supported)


@functools.cache
def _fields_elsewhere() -> frozenset[str]:
    """Return the fields of all routes: on another one they are not misspelt, and ignored as in vLLM."""
    models: tuple[type[Body], ...] = (
        *(CompletionRequest, ChatCompletionRequest, ResponsesRequest),
        *(MessagesRequest, CountTokensRequest),
        *(TokenizeRequest, DetokenizeRequest),
    )
    return frozenset[str]().union(*(model.model_fields.keys() | model.not_supported for model in models))


def check_number_of_fields(model: type[Body], fields: Mapping[str, Any]) -> None:
    """Raise RequestError if more than ``MAX_UNKNOWN_FIELDS`` are unknown, before each of them is looked at."""
    num_unknown = len(fields.keys() - _known_fields(model) - _fields_elsewhere())
    if num_unknown > MAX_UNKNOWN_FIELDS:
        raise refused("body", f"got {num_unknown} unknown fields, allowed are at most {MAX_UNKNOWN_FIELDS}")


def measure_json(field: str, value: object) -> int:
    """Return about how many characters a value has as JSON, whose parts are looked at no longer than they are allowed.

    Raises:
        RequestError: it has too many values or levels.
    """
    size, num_values, waiting = 0, 1, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3 + 1
        elif isinstance(item, (dict, list)):
            num_values += len(item)
            if num_values > MAX_JSON_VALUES:
                raise refused(field, f"got more than {MAX_JSON_VALUES} values, allowed are at most that many")
            if depth > MAX_JSON_DEPTH:
                raise refused(
                    field,
                    f"got lists and objects nested more than {MAX_JSON_DEPTH} levels deep, allowed are at "
                    "most that many",
                )
            if isinstance(item, dict):
                size += sum(map(len, item))
            parts = item.values() if isinstance(item, dict) else item
            waiting.extend((part, depth + 1) for part in parts)
    return size


def check_other_fields(body: Body) -> None:
    """Check the fields that ``body``'s model does not have.

    Raises:
        RequestError: one is not supported, or probably misspelt.
    """
    known = _known_fields(type(body))
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if name in body.not_supported:
            _check_neutral(name, value, body.not_supported[name])
        elif name not in IGNORED and name not in _fields_elsewhere():
            unknown.append(name)
    for name in unknown:
        close = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], known, n=1, cutoff=_LIKENESS)
        if close:
            raise RequestError(
                f"{reprlib.repr(name)}: unknown field; did you mean {close[0]!r}?", parameter=name
            )
    if unknown:
        logger.debug("ignored unknown fields %s", reprlib.repr(unknown))


def _check_neutral(name: str, value: Any, allowed: tuple[object, ...]) -> None:
    if value in allowed:
        return
    neutral = " or ".join("null" if item is None else repr(item) for item in allowed)
    raise refused(name, f"got {reprlib.repr(value)}, which is not supported; allowed is {neutral}")


class LoadLoRAAdapterRequest(Body):
    """Body of ``POST /v1/load_lora_adapter``."""

    not_supported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    """Without effect, as in vLLM for models without experts."""


class UnloadLoRAAdapterRequest(Body):
    """Body of ``POST /v1/unload_lora_adapter``."""

    not_supported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    lora_name: str
    lora_int_id: int | None = None
    """Without effect, as in vLLM."""


# Answers, for /openapi.json only.


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


class MessagesErrorDetail(Exact):
    """Anthropic's error object."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
    ]
    message: str


class MessagesErrorAnswer(Exact):
    """The same of ``/v1/messages`` and what is below."""

    type: Literal["error"]
    error: MessagesErrorDetail


class PromptTokensDetails(Exact):
    """What became of a prompt's tokens in the prefix cache."""

    cached_tokens: int
    created_cache_tokens: int | None
    """Of chats, tokens that were computed; null for completions, as in vLLM."""
    multimodal_tokens: None


class Usage(Exact):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: None


class Choice(Exact):
    """One completion of one prompt."""

    index: int
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None
    """With ``return_token_ids``."""
    routed_experts: None


class Answer(Exact):
    """Fields of every answer with completions."""

    id: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str
    """The same for servers of one version and configuration."""
    service_tier: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class CompletionLogprobs(Exact):
    """Log-probabilities, one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]
    """None for the first token of a prompt that is repeated."""


class PromptLogprob(Exact):
    """One candidate at one place of a prompt."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""Of each token of a prompt, the candidates by token id; None for the first token."""


class CompletionChoice(Choice):
    """One completion of one prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobList | None
    """If asked for, also by ``echo`` with ``logprobs``."""
    prompt_token_ids: list[int] | None
    """With ``return_token_ids``."""


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


class AnswerFunction(Exact):
    """What is called."""

    name: str
    arguments: str
    """JSON as the model wrote it, which may not be valid, nor fit the tool's schema."""


class AnswerToolCall(Exact):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(Exact):
    """The model's answer."""

    role: str
    """The last message's where ``add_generation_prompt`` is false, else assistant."""
    content: str | None
    """None if there are only reasoning and calls."""
    reasoning: str | None
    reasoning_content: str | None = None
    """The same, under its earlier name; left out if there is none."""
    tool_calls: list[AnswerToolCall] = []
    """Left out if there are none."""
    refusal: None
    annotations: None
    audio: None
    function_call: None


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatAnswerModel(Answer):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobList | None
    """If asked for."""
    prompt_token_ids: list[int] | None
    """With ``return_token_ids``."""
    prompt_text: None


class OutputTextPart(Exact):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    """Always empty."""
    logprobs: list[TokenLogprob] | None
    """If ``include`` asks for them."""


class OutputMessage(Exact):
    """The text of an answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextPart]
    phase: None
    status: Literal["completed", "incomplete"]


class OutputReasoningPart(Exact):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Exact):
    """What comes before an answer."""

    id: str
    type: Literal["reasoning"]
    summary: list[None]
    """Always empty."""
    content: list[OutputReasoningPart]
    status: Literal["completed", "incomplete"]


class OutputCall(Exact):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    call_id: str
    # "async" is null, too.
    caller: None
    namespace: None
    name: str
    arguments: str
    """JSON as the model wrote it, which may not be valid, nor fit the tool's schema."""
    status: Literal["completed", "incomplete"]


class InputTokensDetails(Exact):
    """How many tokens of an input were cached before."""

    cached_tokens: int
    cache_write_tokens: int
    """Always 0: writing them costs nothing."""
    input_tokens_per_turn: list[None]
    """Empty, as is all that tools of the server's would need."""
    cached_tokens_per_turn: list[None]


class OutputTokensDetails(Exact):
    """What an answer's tokens are."""

    reasoning_tokens: int
    tool_output_tokens: int
    output_tokens_per_turn: list[None]
    tool_output_tokens_per_turn: list[None]


class ResponseUsage(Exact):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Exact):
    """Why an answer was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseModel(Exact):
    """Answer of ``POST /v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    """None also where the server shut down before the end."""
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    parallel_tool_calls: bool
    reasoning: dict[str, Any] | None
    text: dict[str, Any] | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    truncation: Literal["auto", "disabled"]
    background: Literal[False]
    error: None
    previous_response_id: None
    max_tool_calls: int | None
    prompt: None
    service_tier: str
    user: str | None
    kv_transfer_params: None
    ec_transfer_params: None
    input_messages: None
    output_messages: None


class TextBlock(Exact):
    """The text of an answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Exact):
    """What comes before an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Random: nothing is checked by it."""


class ToolUseBlock(Exact):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """Need not fit the tool's schema. Of arguments that were cut off, what had come; empty where they are no JSON of an
    object."""


class MessageUsage(Exact):
    """Token counts; all together are the conversation's."""

    input_tokens: int
    """Of the prompt, without those that were cached."""
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    """Always 0: creating it costs nothing."""
    output_tokens: int


class MessageModel(Exact):
    """Answer of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    """None where the server shut down before the end."""
    stop_sequence: str | None
    usage: MessageUsage


class ContextManagement(Exact):
    """Nothing is ever taken out of a conversation."""

    original_input_tokens: int


class CountTokensAnswer(Exact):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int
    context_management: ContextManagement


class ModelCard(Exact):
    """One served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    """Of an adapter."""
    permission: list[dict[str, Any]]
    max_model_len: int | None


class ModelList(Exact):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Exact):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """With ``return_token_strs``."""


class DetokenizeAnswer(Exact):
    """Answer of ``POST /detokenize``."""

    prompt: str


class VersionAnswer(Exact):
    """Answer of ``GET /version``."""

    version: str
