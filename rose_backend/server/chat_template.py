"""Conversations to prompts, with the template that came with the model."""

from __future__ import annotations

import functools
import json
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError, RequestError, kind_and_text
from rose_backend.server.protocol import ChatMessage, ToolCall, measure_json, refused

_NO_VARIABLES: Mapping[str, Any] = {}
_END_TAG = "<end of the final message> "
"""Appended to the message to continue, so that its end can be found in the rendered text. The space tells whether the
template trims messages."""
_MAX_REASON_LENGTH = 500
"""Characters of an error that a template raises, which may quote the conversation."""


class ChatTemplate:
    """The template for conversations: that of a file, or the model's, which ``use`` brings.

    Args:
        path: file with a template to use instead of the model's; None takes the model's own.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._template = None if path is None else _read(path)
        self._missing = "this model has no chat template"
        self._tool_template: str | None = None
        self._tokenizer: Tokenizer | None = None

    def use(self, tokenizer: Tokenizer) -> None:
        """Take the model's own template unless there is one already, and the tokenizer for all prompts.

        Raises:
            ConfigError: it is no template.
        """
        self._tokenizer = tokenizer
        templates = tokenizer.chat_templates
        if self._template is None:
            # As in vLLM and transformers, tool_use is for requests with tools; nothing asks for others.
            self._template = templates.get("default")
            self._tool_template = templates.get("tool_use")
            if templates:
                self._missing = (
                    f"this model has several chat templates ({reprlib.repr(sorted(templates))}), none of them "
                    "named default"
                )
        self.check_syntax()

    def check_syntax(self) -> None:
        """Check the template, if there is one, without a conversation.

        Raises:
            ConfigError: it is no template.
        """
        if self._template is None:
            return
        try:
            self._render([{"role": "user", "content": "?"}], sys.maxsize, {"add_generation_prompt": False})
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        except Exception:
            # It does not accept so short a conversation, or none at all; requests report that.
            pass

    def check_available(self) -> None:
        """Refuse conversations if there is no template.

        Raises:
            RequestError: there is none.
        """
        if self._template is None:
            raise refused(
                "messages",
                f"{self._missing}; use /v1/completions, or start the server with --chat-template FILE",
            )

    @functools.cached_property
    def takes_instructions_in_front_only(self) -> bool:
        """Whether the template refuses a system message that is not the first."""
        roles = ("system", "user", "system", "user")
        messages = [{"role": role, "content": "?"} for role in roles]
        try:
            self._render(messages, sys.maxsize, {"add_generation_prompt": False})
        except Exception:  # a template is a program, and may fail in any way
            return True
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        max_length: int,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = _NO_VARIABLES,
        continues: bool = False,
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: answer of ``plain_messages``, after ``parse_arguments``.
            tools: that the model may call.
            variables: others of the template.
            continues: end with the last message's text.
            max_length: of the text, in characters. A template can make any number of one message.

        Raises:
            RequestError: the template refuses the conversation, or fails, or the text is longer or no valid Unicode.
        """
        try:
            messages = self._for_template(messages)
            if continues:
                messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_TAG}]
            own = {"add_generation_prompt": add_generation_prompt, "tools": tools}
            text = self._render(messages, max_length, {**variables, **own})
        except Exception as error:  # a template is a program, and may fail in any way
            reason = kind_and_text(error)[:_MAX_REASON_LENGTH]
            raise refused("messages", f"the model's chat template refuses them ({reason})") from error
        if len(text) > max_length:
            raise refused(
                "messages",
                f"got more than {max_length} characters from the chat template, allowed are at most "
                f"{max_length}",
            )
        if continues:
            text = _up_to_tag(text, messages[-1]["content"])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise refused("messages", f"not valid Unicode text ({error.reason})") from error
        return text

    def _render(self, messages: list[dict[str, Any]], max_length: int, variables: Mapping[str, Any]) -> str:
        """Return the text, or a start of it that is longer than ``max_length``."""
        # Imported here: it takes a second, and is not needed without a template. It does not import torch.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(
            self._tool_template if variables.get("tools") and self._tool_template else self._template
        )
        parts: list[str] = []
        length = 0
        special_tokens = {} if self._tokenizer is None else self._tokenizer.special_tokens
        fixed = {"tools": None, "documents": None}
        for part in template.generate({**fixed, **variables, **special_tokens, "messages": messages}):
            parts.append(part)
            length += len(part)
            if length > max_length:
                break
        return "".join(parts)

    def _for_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in roles that the template knows, as in vLLM: one that does not name the role developer gets
        such messages as the system's, and then all of the system's as one in front."""
        assert self._template is not None
        is_known = '"developer"' in self._template or "'developer'" in self._template
        if is_known or all(message["role"] != "developer" for message in messages):
            return messages
        instructions = [message for message in messages if message["role"] in ("system", "developer")]
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        if len(instructions) == 1 and messages[0] is instructions[0]:
            return [{**instructions[0], "role": "system"}, *others]
        texts = [message["content"] for message in instructions if message["content"]]
        return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _up_to_tag(text: str, final: str) -> str:
    """Return the text of a template up to the end of its last message.

    Args:
        final: that message's content, with the tag.
    """
    tag = _END_TAG.strip()
    at = text.rfind(tag)
    if at < 0 or final.removesuffix(_END_TAG).strip() not in text:
        raise refused(
            "continue_final_message",
            "got a last message whose text the chat template does not show, allowed with others only",
        )
    # As in transformers: a template that trims messages has trimmed this one, too.
    return text[:at] if text[at : at + len(_END_TAG)] == _END_TAG else text[:at].rstrip()


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as vLLM hands them to templates, with one text each, except that the arguments of tool calls
    are still what clients sent (see ``parse_arguments``).

    Raises:
        RequestError: a message has a part that is not supported, or not with its role.
    """
    plain = []
    for index, message in enumerate(messages):
        _check_fields(message, f"messages.{index}")
        content = message.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        fields: dict[str, Any] = {"role": message.role, "content": text}
        if message.tool_calls:
            fields["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is not None:
            fields["reasoning"] = fields["reasoning_content"] = reasoning
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.name:
            fields["name"] = message.name
        plain.append(fields)
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return ({} if call.id is None else {"id": call.id}) | {"type": call.type, "function": function}


def _arguments_path(index: int, number: int) -> str:
    return f"messages.{index}.tool_calls.{number}.function.arguments"


_FIELDS_OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


def _check_fields(message: ChatMessage, path: str) -> None:
    for name, role in _FIELDS_OF_ROLE.items():
        # Clients send an answer of an earlier turn back with all its empty fields.
        if message.role != role and getattr(message, name) not in (None, [], ""):
            raise refused(f"{path}.{name}", f"got it in the role {message.role}, allowed is {role}")
    for name, value in (message.model_extra or {}).items():
        if value not in (None, [], {}, ""):
            allowed = ", ".join(type(message).model_fields)
            raise RequestError(f"{path}.{name}: not supported; allowed are {allowed}", parameter="messages")


def text_lengths(messages: list[dict[str, Any]]) -> list[int]:
    """Return the characters of each text in answers of ``plain_messages``, arguments of tool calls included.

    Raises:
        RequestError: arguments that came as an object have too many values or levels.
    """
    lengths = []
    for index, message in enumerate(messages):
        lengths += [
            len(message[name]) for name in ("content", "reasoning", "tool_call_id", "name") if name in message
        ]
        for number, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if isinstance(arguments, dict):
                lengths.append(len(name) + measure_json(_arguments_path(index, number), arguments))
            else:
                lengths.append(len(name) + len(arguments or ""))
    return lengths


def parse_arguments(messages: list[dict[str, Any]]) -> None:
    """Replace the arguments of tool calls by what they are as JSON, which templates expect. As in vLLM, anything but an
    object becomes an empty one: an earlier answer cannot be mended by the client.

    Raises:
        RequestError: they have too many values or levels.
    """
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            if isinstance(function["arguments"], dict):
                continue
            path = _arguments_path(index, number)
            try:
                parsed = json.loads(function["arguments"] or "{}")
            except RecursionError as error:
                raise refused(path, "got lists and objects that are nested too deeply") from error
            except ValueError:
                parsed = {}
            measure_json(path, parsed)
            function["arguments"] = parsed if isinstance(parsed, dict) else {}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path} ({error})") from error
